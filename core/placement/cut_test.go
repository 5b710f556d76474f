package placement

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/paceline/paceline/internal/limits"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

func TestCutOfKnownTensors(t *testing.T) {
	for _, c := range []struct {
		name                    string
		total                   uint64
		elem, partBytes, server int
		slices                  []int64
		want                    []uint32
	}{
		{"nothing", 0, 4, 4 * mib, 2, nil, []uint32{0}},
		{"one element", 8, 8, 4 * mib, 4, nil, []uint32{8}},
		{"too small to spread", 64 * kib, 4, 4 * mib, 2, nil, []uint32{64 * kib}},
		{"just large enough to spread", 128 * kib, 4, 4 * mib, 2, nil, []uint32{64 * kib, 64 * kib}},
		{"spread as far as it goes", 192 * kib, 4, 4 * mib, 8, nil, []uint32{64 * kib, 64 * kib, 64 * kib}},
		{"1 MiB over 2 servers", mib, 4, 4 * mib, 2, nil, []uint32{512 * kib, 512 * kib}},
		{"whole partitions", 16 * mib, 4, 4 * mib, 2, nil, []uint32{4 * mib, 4 * mib, 4 * mib, 4 * mib}},
		{"as many for each server", 12 * mib, 4, 4 * mib, 2, nil, []uint32{3 * mib, 3 * mib, 3 * mib, 3 * mib}},
		{"one byte more than a partition", 4*mib + 1, 1, 4 * mib, 1, nil, []uint32{2 * mib, 2*mib + 1}},
		{"a small partition size is obeyed", 4096, 4, 1024, 1, nil, []uint32{1024, 1024, 1024, 1024}},
		{"rows of reducescatter", 30, 2, 4 * mib, 2, []int64{10, 20}, []uint32{10, 10, 10}},
		{"ranks without rows", 20, 4, 4 * mib, 4, []int64{0, 8, 8, 20}, []uint32{8, 12}},
		{"large slices", 2 * mib, 4, 4 * mib, 4, []int64{mib}, []uint32{512 * kib, 512 * kib, 512 * kib, 512 * kib}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Cut(c.total, c.elem, c.partBytes, c.server, c.slices); !slices.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

func TestCutKeepsItsPromisesForAnyTensor(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5_000 {
		elem := 1 << rng.IntN(4)
		total := uint64(elem) * rng.Uint64N(1<<rng.IntN(28))
		partBytes := 1 + int(total>>10) + rng.IntN(1<<rng.IntN(25))
		servers := 1 + rng.IntN(20)
		var at []int64
		for range rng.IntN(4) * rng.IntN(2) {
			at = append(at, int64(elem)*rng.Int64N(int64(total)/int64(elem)+1))
		}
		slices.Sort(at)
		checkCut(t, Cut(total, elem, partBytes, servers, at), total, elem, partBytes, servers, at)
	}
}

func checkCut(t *testing.T, parts []uint32, total uint64, elem, partBytes, servers int, at []int64) {
	t.Helper()
	fail := func(why string) {
		t.Helper()
		t.Fatalf("Cut(%d, %d, %d, %d, %v) = %v: %s", total, elem, partBytes, servers, at, parts, why)
	}
	var sum uint64
	cuts := map[int64]bool{}
	for _, p := range parts {
		cuts[int64(sum)] = true
		sum += uint64(p)
		switch {
		case int(p)%elem != 0:
			fail("not whole elements")
		case p == 0 && total > 0:
			fail("an empty partition")
		case int(p) > max(partBytes, elem, int(ceil(total, limits.MaxParts/2))):
			fail("larger than the setting")
		}
	}
	cuts[int64(sum)] = true
	if sum != total || len(parts) == 0 || len(parts) > limits.MaxParts {
		fail("wrong sum or number")
	}
	for _, a := range at {
		if !cuts[a] {
			fail("no cut at a slice")
		}
	}
	if len(at) > 0 || total == 0 {
		return
	}
	// Equal up to the alignment at both ends.
	if slack := uint32(2*line + elem); slices.Max(parts)-slices.Min(parts) > slack {
		fail("unequal partitions")
	}
	if partBytes >= 2*limits.MinPartition && total >= uint64(servers)*limits.MinPartition && len(parts)%servers != 0 {
		fail("not as many for each server")
	}
}

func TestCutStaysBelowTheGreatestNumberOfPartitions(t *testing.T) {
	if n := len(Cut(limits.MaxTensor, 4, 4*kib, 7, nil)); n > limits.MaxParts {
		t.Errorf("%d partitions", n)
	}
}
