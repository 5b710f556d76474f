package placement

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

// What a policy promises of the order in which a model's tensors come: those that sort them give each the same servers in
// any order, and MXNet's hash does not look at the others at all.
func TestTheOrderOfTensorsDoesNotMatterWherePromised(t *testing.T) {
	rng := rand.New(rand.NewPCG(21, 22))
	for _, name := range []string{"largest-first", "eps", "proportional", "optimus", "mxnet"} {
		for range 100 {
			servers := 1 + rng.IntN(9)
			model := make([]Load, 40)
			sizes := map[uint64]bool{}
			for i := range model {
				total := 4 * (1 + rng.Uint64N(6*mib))
				for sizes[total] { // of equal ones the first goes first
					total += 4
				}
				sizes[total] = true
				policy, err := Parse(name)
				if err != nil {
					t.Fatal(err)
				}
				model[i] = Load{Number: uint32(i), Parts: policy.Cut(total, 4, 4*mib, servers, nil), Home: Free}
			}
			shuffled := slices.Clone(model)
			rng.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
			want := place(t, name, Even(servers)).Place(model)
			for i, got := range place(t, name, Even(servers)).Place(shuffled) {
				if number := shuffled[i].Number; !slices.Equal(got, want[number]) {
					t.Fatalf("%s: tensor %d is on %v in one order and on %v in another", name, number, want[number], got)
				}
			}
		}
	}
}

// Optimus fills every server to its share: no server has more than that and one partition, where no tensor is larger than a share.
func TestOptimusFillsSharesToAPartition(t *testing.T) {
	rng := rand.New(rand.NewPCG(23, 24))
	for range 200 {
		servers := 1 + rng.IntN(8)
		batch := make([]Load, 20+rng.IntN(30)) // none is below a hundredth of a share
		var total, largest float64
		for i := range batch {
			n := mib/2 + rng.Uint32N(mib/2)
			batch[i] = Load{Number: uint32(i), Parts: []uint32{n}, Home: Free}
			total, largest = total+float64(n), max(largest, float64(n))
		}
		loads := held(servers, batch, place(t, "optimus", Even(servers)).Place(batch))
		if most := slices.Max(loads); most > total/float64(servers)+largest+64*50 {
			t.Fatalf("%d servers hold %v, the share is %v and the largest tensor %v", servers, loads, total/float64(servers), largest)
		}
	}
}

// A remap of EPS gives every server the same bytes to within its largest block, and moves nothing where it has them.
func TestEPSIsEvenAfterAnyChange(t *testing.T) {
	rng := rand.New(rand.NewPCG(25, 26))
	policy, err := Parse("eps")
	if err != nil || !policy.Remaps() {
		t.Fatal(err, policy.Remaps())
	}
	for range 200 {
		s := Situation{Weights: Even(2 + rng.IntN(12))}
		gone := rng.IntN(len(s.Weights))
		s.Weights[gone] = float64(rng.IntN(2))
		var largest float64
		for range 1 + rng.IntN(300) {
			b := Block{Bytes: rng.Uint64N(1 << rng.IntN(23)), Server: rng.IntN(len(s.Weights)+1) - 1}
			s.Blocks = append(s.Blocks, b)
			largest = max(largest, float64(b.Bytes))
		}
		servers, err := policy.Remap(s)
		if err != nil {
			t.Fatal(err)
		}
		for i, at := range servers {
			if s.Weights[at] == 0 {
				t.Fatalf("block %d is on server %d, which takes none", i, at)
			}
			s.Blocks[i].Server = at
		}
		loads := s.loads()
		for i := len(loads) - 1; i >= 0; i-- {
			if s.Weights[i] == 0 {
				loads = slices.Delete(loads, i, i+1)
			}
		}
		if spread := slices.Max(loads) - slices.Min(loads); spread > largest+64*300 {
			t.Fatalf("servers hold %v, the largest block is %v", loads, largest)
		}
		if again, err := policy.Remap(s); err != nil || !reflect.DeepEqual(again, servers) {
			t.Fatalf("an even placement is changed (%v)", err)
		}
	}
}

// When one of n servers goes, EPS moves what it had, and little else.
func TestEPSMovesLittle(t *testing.T) {
	s := Situation{Weights: Even(8)}
	for i := range 800 {
		s.Blocks = append(s.Blocks, Block{Bytes: 4 * mib, Server: i % 8})
	}
	s.Weights[3] = 0
	servers := s.even(s.Weights)
	moved := 0
	for i, b := range s.Blocks {
		if servers[i] != b.Server {
			moved++
		}
	}
	if moved != 100 {
		t.Errorf("%d blocks move, server 3 had 100", moved)
	}
}

// The uniform split cuts the smallest tensors too; whole-tensor policies cut only at the size of a partition.
func TestAPolicyDecidesHowTensorsAreCut(t *testing.T) {
	for _, c := range []struct {
		name  string
		total uint64
		want  []uint32
	}{
		{"largest-first", 40, []uint32{40}},
		{"uniform", 40, []uint32{8, 12, 8, 12}},
		{"uniform", 8, []uint32{4, 4}},
		{"tensor-round-robin", mib, []uint32{mib}},
		{"tensorflow", 6 * mib, []uint32{3 * mib, 3 * mib}},
		{"mxnet", 3_999_996, []uint32{3_999_996}},
		{"mxnet", 4_194_304, []uint32{mib, mib, mib, mib}},
		{"mxnet:1000000", mib, []uint32{mib / 4, mib / 4, mib / 4, mib / 4}},
	} {
		p, err := Parse(c.name)
		if err != nil {
			t.Fatal(err)
		}
		got := p.Cut(c.total, 4, 4*mib, 4, nil)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s cuts %d into %v, want %v", c.name, c.total, got, c.want)
		}
	}
}
