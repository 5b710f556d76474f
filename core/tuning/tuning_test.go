package tuning

import (
	"math"
	"math/rand/v2"
	"testing"
)

var start = Point{Partition: 4 << 20, Credit: 16 << 20, Fusion: 64 << 10, Connections: 1}

// landscape is how fast a job is at a point, before noise.
type landscape func(Point) float64

// flat has no better point than any other.
func flat(Point) float64 { return 1e8 }

// peak is fastest at one partition size and credit: a factor of four away costs a tenth.
func peak(partition, credit int64) landscape {
	off := func(a, b int64) float64 { return math.Abs(math.Log2(float64(a)/float64(b))) / 2 }
	return func(p Point) float64 { return 1e8 * math.Pow(0.9, off(p.Partition, partition)+off(p.Credit, credit)) }
}

// ridge has gains in each setting alone that are lost together.
func ridge(p Point) float64 {
	changed := 0
	if p.Partition != start.Partition {
		changed++
	}
	if p.Credit != start.Credit {
		changed++
	}
	return 1e8 * []float64{1, 1.1, 0.5}[changed]
}

// search runs a search in a landscape whose rates are off by a random factor, one of which in ten by half: others use the machine.
// It returns the winner and the number of steps.
func search(c Config, at landscape, noise float64, seed uint64) (*Search, uint64) {
	random := rand.New(rand.NewPCG(seed, 0))
	s := New(c)
	for !s.Over() {
		var rates []float64
		for _, p := range s.Trials() {
			rate := at(p) * (1 + noise*random.NormFloat64())
			if noise > 0 && random.IntN(10) == 0 {
				rate /= 2
			}
			rates = append(rates, rate)
		}
		s.Decide(rates)
	}
	return s, s.running().from
}

func TestTheOptimumIsFound(t *testing.T) {
	s, steps := search(Config{Start: start, Warmup: 3, Steps: 10}, peak(256<<10, 64<<20), 0, 0)
	if want := (Point{256 << 10, 64 << 20, 64 << 10, 1}); s.Best() != want {
		t.Errorf("the search ends at %+v, the optimum is %+v", s.Best(), want)
	}
	if by := s.Speedup(); by < 1.3 || steps > 1000 {
		t.Errorf("%.2f times as fast, after %d steps", by, steps)
	}
}

// TestTheEndIsNotSlowerThanTheStart searches landscapes with noise of every size many times. Where the winner is another point
// than the start, it is faster; where nothing is faster, it is seldom another one at all.
func TestTheEndIsNotSlowerThanTheStart(t *testing.T) {
	const runs = 400
	for name, at := range map[string]landscape{"flat": flat, "ridge": ridge, "peak at the start": peak(start.Partition, start.Credit), "peak elsewhere": peak(1<<20, 4<<20)} {
		for _, noise := range []float64{0, 0.01, 0.05, 0.2} {
			slower := 0
			for seed := range uint64(runs) {
				if s, _ := search(Config{Start: start, Warmup: 1, Steps: 10}, at, noise, seed); at(s.Best()) < at(start) {
					slower++
				}
			}
			if slower > runs/20 { // by chance alone: eight trials of either can mislead
				t.Errorf("%s, noise %g: %d of %d searches end at a slower point", name, noise, slower, runs)
			}
		}
	}
}

func TestALittleNoiseDoesNotHideAGain(t *testing.T) {
	found := 0
	for seed := range uint64(100) {
		if s, _ := search(Config{Start: start, Warmup: 1, Steps: 10}, peak(256<<10, 16<<20), 0.01, seed); s.Best().Partition == 256<<10 {
			found++
		}
	}
	if found < 60 {
		t.Errorf("%d of 100 searches find the partition size that is a tenth faster", found)
	}
}

func TestTrialsWithoutMeasurementsChooseNothing(t *testing.T) {
	s := New(Config{Start: start, Warmup: 2, Steps: 10})
	for !s.Over() {
		s.Decide(make([]float64, len(s.Trials())))
	}
	if s.Best() != start || s.Speedup() != 1 {
		t.Errorf("ends at %+v", s.Best())
	}
	for s := New(Config{Start: start}); !s.Over(); s.Decide(nil) {
		if len(s.phases) > 10 {
			t.Fatal("does not end")
		}
	}
}

// TestAStepHasOnePoint asks for every step before and after each decision: the answer stays, and is missing only for
// steps after the gap behind the running phase.
func TestAStepHasOnePoint(t *testing.T) {
	c := Config{Start: start, Warmup: 1, Steps: 3}
	at := peak(256<<10, 4<<20)
	s := New(c)
	var known []Point
	for {
		var rates []float64
		for _, p := range s.Trials() {
			rates = append(rates, at(p))
		}
		end := s.End()
		for step := range end + Gap + 20 {
			p, there := s.At(step)
			switch {
			case there != (s.Over() || step < end+Gap):
				t.Fatalf("phase %s, step %d of %d: known is %v", s.Phase(), step, end, there)
			case int(step) < len(known) && known[step] != p:
				t.Fatalf("step %d had %+v, and has %+v", step, known[step], p)
			case there && int(step) >= len(known):
				known = append(known, p)
			}
			if trial, within, in := s.Trial(step); in && (s.Trials()[trial] != p || within >= c.Steps) {
				t.Fatalf("step %d is the trial of another point", step)
			}
		}
		if s.Over() {
			return
		}
		s.Decide(rates)
	}
}

func TestSettingsAtTheirLimitsHaveFewerCandidates(t *testing.T) {
	for _, p := range []Point{{64 << 10, 64 << 10, 0, 64}, {256 << 20, 1 << 40, 256 << 10, 4}, {1, 1, 1, 1}} {
		credit, conns := Bounds(p)
		if credit < min(p.Credit, minCredit) || conns > max(p.Connections, maxConnections) {
			t.Errorf("%+v: credit from %d, up to %d connections", p, credit, conns)
		}
		for seed := range uint64(50) {
			s, _ := search(Config{Start: p, Warmup: 1, Steps: 1}, flat, 0.5, seed)
			if b := s.Best(); b.Credit < credit || b.Connections > conns || b.Partition < 1 || b.Fusion < 0 {
				t.Errorf("from %+v to %+v", p, b)
			}
		}
	}
}

func TestThePartitionSizeStaysWhereItHasTo(t *testing.T) {
	s := New(Config{Start: start, KeepCut: true, Warmup: 1, Steps: 1})
	for ; !s.Over(); s.Decide(nil) {
		for _, p := range s.Trials() {
			if p.Partition != start.Partition {
				t.Fatalf("a trial of %+v", p)
			}
		}
	}
}
