package placement

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(a), math.Abs(b)) }

// PSLD section 4.1: Pred(r, s) = alpha s + beta by linear regression.
func TestALineIsFittedToExchanges(t *testing.T) {
	var f Fit
	if _, ok := f.Sample(); ok {
		t.Error("a line without exchanges")
	}
	for _, bytes := range []float64{1e6, 2e6, 4e6, 4e6} {
		f.Add(bytes, 2e-9*bytes+0.003)
	}
	s, ok := f.Sample()
	if !ok || !near(s.Alpha, 2e-9) || !near(s.Beta, 0.003) || s.Bytes != 11e6 || !near(s.Seconds, 0.034) || s.Error > 1e-9 {
		t.Errorf("sample %+v", s)
	}
	for name, points := range map[string][][2]float64{
		"one size alone":   {{4e6, 0.01}, {4e6, 0.03}},
		"falling":          {{1e6, 0.03}, {2e6, 0.01}},
		"beginning before": {{1e6, 0.001}, {2e6, 0.1}},
	} {
		var f Fit
		var xy, xx float64
		for _, p := range points {
			f.Add(p[0], p[1])
			xy, xx = xy+p[0]*p[1], xx+p[0]*p[0]
		}
		if s, _ := f.Sample(); s.Beta != 0 || !near(s.Alpha, xy/xx) {
			t.Errorf("%s: %+v, want proportional", name, s)
		}
	}
	var empty Fit
	empty.Add(0, 0.5)
	if s, _ := empty.Sample(); s.Line != (Line{Beta: 0.5}) {
		t.Errorf("exchanges without bytes: %+v", s)
	}
}

// Section 4.1: mean and standard error over all workers; 5.1: a newcomer is predicted at the average.
func TestProfilesAreMeansOverWorkers(t *testing.T) {
	p := Profiles{
		{{Line: Line{Alpha: 1}, Bytes: 10, Seconds: 10}, {Line: Line{Alpha: 3}, Bytes: 10, Seconds: 30}, {Line: Line{Alpha: 2}, Bytes: 10, Seconds: 20}},
		{{Line: Line{Alpha: 4}, Bytes: 10, Seconds: 40, Error: 0.5}},
	}
	for server, want := range [][2]float64{{20, 10 / math.Sqrt(3)}, {40, 0.5}, {30, (10/math.Sqrt(3) + 0.5) / 2}} {
		if mean, sem := p.predict(server, 10); !near(mean, want[0]) || !near(sem, want[1]) {
			t.Errorf("server %d: %v ± %v, want %v", server, mean, sem, want)
		}
	}
	if got, want := p.Speeds(3), []float64{0.5, 0.25, 0.375}; !slices.Equal(got, want) {
		t.Errorf("speeds %v, want %v", got, want)
	}
	if got := Profiles(nil).Speeds(2); !slices.Equal(got, Even(2)) {
		t.Errorf("speeds without profiles: %v", got)
	}
	s := Situation{Weights: []float64{1, 1, 1, 0}, Profiles: append(p, nil, Profile{{Bytes: 1000, Seconds: 1}})}
	if v := s.variation(); v != 1 { // section 2.3; a server without keys does not count
		t.Errorf("variation %v", v)
	}
}

// measured is profiles with these means and standard errors for a share of the bytes, of two workers.
func measured(share float64, means, errors []float64) (p Profiles) {
	for i := range means {
		// Of two samples m-e and m+e the standard error is e.
		p = append(p, Profile{
			{Line: Line{Beta: means[i] - errors[i]}, Bytes: share, Seconds: means[i]}, {Line: Line{Beta: means[i] + errors[i]}, Bytes: share, Seconds: means[i]},
		})
	}
	return p
}

const margin = 0.1

// Section 4.2, Algorithm 1.
func TestTheSuperiorSetIsClosedUnderTheConfidenceBounds(t *testing.T) {
	for _, c := range []struct {
		name          string
		means, errors []float64
		want          []int
	}{
		{"one slow", []float64{1, 1.05, 10, 0.95}, []float64{0.1, 0.1, 0.1, 0.1}, []int{3, 0, 1}},
		{"a chain of overlaps", []float64{1, 1.3, 1.6, 1.9}, []float64{0.1, 0.1, 0.1, 0.1}, []int{0, 1, 2, 3}},
		{"a gap in a chain", []float64{1, 1.3, 1.9, 2.1}, []float64{0.1, 0.1, 0.1, 0.1}, []int{0, 1}},
		{"alike, without any error", []float64{1, 1, 1}, []float64{0, 0, 0}, []int{0, 1, 2}},
		{"surely slower, but by little", []float64{1.001, 1, 1.05}, []float64{0, 0, 0}, []int{1, 0, 2}},
		{"surely slower by a tenth", []float64{1.101, 1}, []float64{0, 0}, []int{1}},
		{"an unsure one is not excluded", []float64{1, 5}, []float64{0.1, 3}, []int{0, 1}},
		{"one alone", []float64{7}, []float64{0}, []int{0}}, // Algorithm 1 has no exit when none is left
	} {
		s := Situation{Weights: Even(len(c.means)), Profiles: measured(100, c.means, c.errors), Blocks: []Block{{Bytes: 100, Server: 0}}}
		if got := s.superior(margin); !slices.Equal(got, c.want) {
			t.Errorf("%s: superior are %v, want %v", c.name, got, c.want)
		}
	}
}

// Every server outside the superior set is worse, by its lower bound and the margin, than the upper bounds of all inside (section 4.2).
func TestServersOutsideTheSuperiorSetAreWorse(t *testing.T) {
	rng := rand.New(rand.NewPCG(31, 32))
	for range 1000 {
		n := 1 + rng.IntN(12)
		means, errors := make([]float64, n), make([]float64, n)
		for i := range means {
			means[i], errors[i] = 1+10*rng.Float64(), rng.Float64()
		}
		s := Situation{Weights: Even(n), Profiles: measured(1, means, errors)}
		set := s.superior(margin)
		for out := range n {
			for _, in := range set {
				if !slices.Contains(set, out) && means[out]-confidence*errors[out] < (1+margin)*(means[in]+confidence*errors[in])-1e-9 {
					t.Fatalf("%v ± %v: superior are %v, yet %d may be as good as %d", means, errors, set, out, in)
				}
			}
		}
		if len(set) == 0 {
			t.Fatalf("%v ± %v: no superior server", means, errors)
		}
	}
}

// linear is profiles of servers that need seconds for a byte.
func linear(alphas ...float64) (p Profiles) {
	for _, a := range alphas {
		p = append(p, Profile{{Line: Line{Alpha: a}, Bytes: 1, Seconds: a}, {Line: Line{Alpha: a}, Bytes: 1, Seconds: a}})
	}
	return p
}

// blocksOn is n blocks of 4 MiB, dealt in turn.
func blocksOn(servers, n int) (blocks []Block) {
	for i := range n {
		blocks = append(blocks, Block{Bytes: 4 * mib, Server: i % servers})
	}
	return blocks
}

// Algorithm 2: without exploration, stragglers get nothing and the superior servers the same.
func TestExploitationFillsSuperiorServersEvenly(t *testing.T) {
	s := Situation{Weights: Even(4), Profiles: linear(1e-9, 1e-9, 1e-8, 1e-9), Blocks: blocksOn(4, 90)}
	for i, at := range (psld{ratio: 1}).assign(s) {
		s.Blocks[i].Server = at
	}
	if got, want := s.loads(), []float64{120 * mib, 120 * mib, 0, 120 * mib}; !slices.Equal(got, want) {
		t.Errorf("loads %v, want %v", got, want)
	}
}

// Algorithm 3: about epsilon of the blocks go to any server, stragglers included; the same seed gives the same assignment.
func TestExplorationTriesEveryServer(t *testing.T) {
	s := Situation{Weights: []float64{1, 1, 1, 0}, Profiles: linear(1e-9, 1e-9, 1e-8, 1e-9), Blocks: blocksOn(3, 30_000), Seed: 5}
	p := psld{epsilon: 0.1, ratio: 1}
	servers := p.assign(s)
	slow := 0
	for _, at := range servers {
		if at == 3 {
			t.Fatal("a server of weight 0 gets a block")
		}
		if at == 2 {
			slow++
		}
	}
	if slow < 900 || slow > 1100 { // a third of a tenth
		t.Errorf("%d of 30000 blocks explore the straggler", slow)
	}
	if !slices.Equal(p.assign(s), servers) {
		t.Error("the same seed gives another assignment")
	}
}

// A newcomer, predicted at the average, gets its share of what is assigned (section 5.1).
func TestANewcomerGetsAShare(t *testing.T) {
	s := Situation{Weights: Even(3), Profiles: linear(1e-9, 1e-9), Blocks: blocksOn(2, 90)}
	for i, at := range (psld{ratio: 1}).assign(s) {
		s.Blocks[i].Server = at
	}
	if got, want := s.loads(), []float64{120 * mib, 120 * mib, 120 * mib}; !slices.Equal(got, want) {
		t.Errorf("loads %v, want %v", got, want)
	}
}

// Sections 4 and 4.4: a remap from a variation above 1 on; one more server where the superior set is below half of the
// first servers.
func TestTheTriggerAndTheScaleThreshold(t *testing.T) {
	policy, err := Parse("psld")
	if err != nil {
		t.Fatal(err)
	}
	strict, err := Parse("psld:0.1,1,0.5,0.9")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		alphas       []float64
		want, strict Verdict
	}{
		{[]float64{1, 1, 1, 1}, Verdict{}, Verdict{}},
		{[]float64{1, 1, 1, 1.9}, Verdict{}, Verdict{Remap: true, Grow: true}},
		{[]float64{1, 1, 1, 2.1}, Verdict{Remap: true}, Verdict{Remap: true, Grow: true}},
		{[]float64{1, 1, 9, 9}, Verdict{Remap: true}, Verdict{Remap: true, Grow: true}},
		{[]float64{1, 9, 9, 9}, Verdict{Remap: true, Grow: true}, Verdict{Remap: true, Grow: true}},
	} {
		s := Situation{Weights: Even(4), Initial: 4, Profiles: linear(c.alphas...), Blocks: blocksOn(4, 40)}
		if got := policy.Judge(s); got != c.want {
			t.Errorf("%v: %+v, want %+v", c.alphas, got, c.want)
		}
		if got := strict.Judge(s); got != c.strict {
			t.Errorf("%v with %s: %+v, want %+v", c.alphas, strict.Name, got, c.strict)
		}
	}
}

// The strawman (section 6.1): bytes in proportion to speed.
func TestProportionalSharesFollowSpeeds(t *testing.T) {
	policy, err := Parse("proportional")
	if err != nil {
		t.Fatal(err)
	}
	s := Situation{Weights: Even(3), Profiles: linear(1, 1, 10), Blocks: blocksOn(3, 210)}
	if !policy.Judge(s).Remap {
		t.Error("a straggler is no reason to remap")
	}
	servers, err := policy.Remap(s)
	if err != nil {
		t.Fatal(err)
	}
	for i, at := range servers {
		s.Blocks[i].Server = at
	}
	if got, want := s.loads(), []float64{400 * mib, 400 * mib, 40 * mib}; !slices.Equal(got, want) {
		t.Errorf("loads %v, want %v", got, want)
	}
}

func TestASampleThatNoExchangeCanHaveIsRefused(t *testing.T) {
	good := Sample{Line: Line{Alpha: 1e-9, Beta: 1e-3}, Bytes: 1e6, Seconds: 0.5, Error: 1e-4}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for _, x := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 1e300} {
		for what, set := range map[string]func(s *Sample){
			"alpha": func(s *Sample) { s.Alpha = x }, "beta": func(s *Sample) { s.Beta = x }, "bytes": func(s *Sample) { s.Bytes = x },
			"seconds": func(s *Sample) { s.Seconds = x }, "error": func(s *Sample) { s.Error = x },
		} {
			bad := good
			set(&bad)
			if err := bad.Check(); err == nil || !strings.Contains(err.Error(), what) {
				t.Errorf("%s %v: error %v", what, x, err)
			}
		}
	}
	for _, none := range []Sample{{Line: good.Line, Seconds: 1}, {Line: good.Line, Bytes: 1}} {
		if none.Check() == nil {
			t.Errorf("%+v is taken", none)
		}
	}
}
