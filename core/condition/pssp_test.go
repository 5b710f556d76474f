package condition

import (
	"math"
	"math/rand/v2"
	"testing"
)

// FluentPS section III-E1: with c = 0 constant PSSP is ASP, with c = 1 it is SSP; below a lead of s no
// model of the family waits.
func TestPSSPLiesBetweenASPAndSSP(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		v := View{Rank: rng.IntN(64), Progress: rng.Uint64N(20), V: rng.Uint64N(20), Significance: rng.Float32() * 2}
		s, seed := rng.Uint64N(5), rng.Uint64()
		ssp := SSP(s).Pull.Holds(v)
		if got := PSSP(s, 0, seed).Pull.Holds(v); !got {
			t.Fatalf("pssp with c = 0 holds back %+v", v)
		}
		if got := PSSP(s, 1, seed).Pull.Holds(v); got != ssp {
			t.Fatalf("pssp with c = 1: %v, ssp: %v for %+v", got, ssp, v)
		}
		for _, m := range []Model{PSSP(s, 0.5, seed), DynamicPSSP(s, Constant(1), seed), DynamicPSSP(s, Significance{}, seed)} {
			if ssp && !m.Pull.Holds(v) {
				t.Fatalf("%s holds back %+v at a lead under %d", m.Name, v, s)
			}
		}
	}
}

// FluentPS section III-E2: P(s,k) grows from α/2 at k = s towards α, and α may be the push's
// significance, cut off at 1.
func TestDynamicProbabilityGrowsFromHalfAlphaToAlpha(t *testing.T) {
	p := Growing{S: 3, Alpha: Constant(0.8)}
	before := 0.0
	for k := uint64(3); k < 40; k++ {
		got := p.Of(View{Progress: 10 + k, V: 10})
		if want := 0.8 / (1 + math.Exp(3-float64(k))); math.Abs(got-want) > 1e-15 || got < before || got < 0.4 || got > 0.8 {
			t.Fatalf("P(3, %d) = %v after %v, want %v", k, got, before, want)
		}
		before = got
	}
	for g, want := range map[float32]float64{0: 0, 0.25: 0.25, 1: 1, 3: 1, -1: 0, float32(math.NaN()): 0, float32(math.Inf(1)): 1} {
		if got := (Significance{}).Of(View{Significance: g}); got != want {
			t.Errorf("significance %v counts as %v, want %v", g, got, want)
		}
	}
}

// One draw per (worker, progress): every key and shard, of any version, must come to the same number.
func TestDrawsAreAgreedAndUniform(t *testing.T) {
	for _, d := range []struct {
		seed     uint64
		rank     int
		progress uint64
		want     float64
	}{{0, 0, 0, 0.13870941014555427}, {0, 0, 1, 0.2582654469187293}, {0, 1, 0, 0.5803592313314876}, {42, 7, 1_000_000, 0.9945878051453232}} {
		if got := draw(d.seed, d.rank, d.progress); got != d.want {
			t.Errorf("draw(%d, %d, %d) = %v, want %v", d.seed, d.rank, d.progress, got, d.want)
		}
	}
	const n = 100_000
	var sum float64
	var held [10]int
	for k := range uint64(n) {
		x := draw(5, int(k%100), k/100)
		sum += x
		held[int(x*10)]++
	}
	if mean := sum / n; math.Abs(mean-0.5) > 0.005 {
		t.Errorf("mean %v", mean)
	}
	for i, h := range held {
		if math.Abs(float64(h)-n/10) > 500 {
			t.Errorf("%d of %d draws lie in [%d/10, %d/10)", h, n, i, i+1)
		}
	}
}
