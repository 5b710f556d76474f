package condition

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/rankset"
)

// TestRandomSchedules drives machines with random schedules of workers that push, repeat themselves,
// run late, die and come back, while conditions change. It holds them against the ledger below.
func TestRandomSchedules(t *testing.T) {
	first := uint64(time.Now().UnixNano())
	for seed := first; seed < first+300; seed++ {
		if !t.Run("", func(t *testing.T) { runSchedule(t, seed) }) {
			t.Fatalf("seed %d", seed)
		}
	}
}

func FuzzSchedules(f *testing.F) {
	for seed := range uint64(16) {
		f.Add(seed)
	}
	f.Fuzz(runSchedule)
}

func runSchedule(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	n := 1 + rng.IntN(9)
	c := Config{Live: rankset.Range(n), Model: BSP()}
	if rng.IntN(2) == 0 {
		c = Config{Live: rankset.Range(n), Model: Model{"lead", lead{uint64(rng.IntN(4))}, some{1 + rng.IntN(n)}},
			Dataflow: Accumulate, Parking: Parking(rng.IntN(2))}
	}
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	l := newLedger(t, m, c)
	next := make([]uint64, n) // iteration that each rank pushes next
	for range 400 {
		r := rng.IntN(n)
		switch k := rng.IntN(40); {
		case k < 16:
			l.push(r, next[r])
			next[r]++
		case k < 32:
			l.pull(r, next[r]-min(next[r], uint64(rng.IntN(3))))
		case k < 35:
			l.push(r, next[r]-min(next[r], uint64(rng.IntN(3)))) // again, or late, or early
		case k < 37:
			next[r] = max(next[r], m.V()) // brought up to date
		case k < 39:
			l.live(rng, n)
		case c.Dataflow == Accumulate && rng.IntN(2) == 0:
			l.step(SetPull(lead{uint64(rng.IntN(5))}))
		case c.Dataflow == Accumulate:
			l.step(SetPush(some{1 + rng.IntN(n)}))
		}
	}
	l.finish(n)
}

// ledger is the plain account of what a machine must do: no pull lost or answered twice, V never
// back, every push admitted once or told to be late, doubled or refused, contributors exact.
type ledger struct {
	t        *testing.T
	m        *Machine
	bsp      bool
	alive    rankset.Set
	v        uint64
	admitted map[uint64]*rankset.Set
	waiting  map[request]bool
}

type request struct {
	rank     int
	progress uint64
}

func newLedger(t *testing.T, m *Machine, c Config) *ledger {
	return &ledger{t: t, m: m, bsp: c.Dataflow == Aggregate, alive: c.Live.Clone(),
		admitted: map[uint64]*rankset.Set{}, waiting: map[request]bool{}}
}

func (l *ledger) push(rank int, progress uint64) {
	l.t.Helper()
	closed := progress < l.v
	if l.admitted[progress] == nil {
		l.admitted[progress] = &rankset.Set{}
	}
	twice := l.admitted[progress].Has(rank)
	live := l.alive.Has(rank)
	if live && !closed && !twice {
		l.admitted[progress].Add(rank)
	}
	out := l.step(Push(rank, progress, 0))
	got := out[0].Kind
	switch {
	case out[0].Rank != rank || out[0].Progress != progress:
		l.t.Fatalf("push of rank %d iteration %d: first output %v", rank, progress, out[0])
	case !live && got != Drop, live && !closed && twice && got != Duplicate, live && !closed && !twice && got != Admit,
		live && closed && got != Drop && got != Duplicate:
		l.t.Fatalf("push of rank %d iteration %d (live %v, closed %v, twice %v): %v", rank, progress, live, closed, twice, got)
	}
}

func (l *ledger) pull(rank int, progress uint64) {
	l.t.Helper()
	key := request{rank, progress}
	waits := l.waiting[key]
	l.waiting[key] = true
	out := l.step(Pull(rank, progress))
	if len(out) != 1 || waits != (out[0].Kind == Duplicate) || l.waiting[key] == (out[0].Kind == Answer) {
		l.t.Fatalf("pull of rank %d iteration %d (waits already: %v): %v", rank, progress, waits, out)
	}
}

func (l *ledger) live(rng *rand.Rand, n int) {
	l.alive.Reset()
	for r := range n {
		if rng.IntN(4) > 0 {
			l.alive.Add(r)
		}
	}
	l.step(Live(l.alive))
}

// step runs the input and books its advances and answers.
func (l *ledger) step(in Input) []Output {
	l.t.Helper()
	out := l.m.Step(in, nil)
	for _, o := range out {
		switch o.Kind {
		case Advance:
			if o.Progress != l.v {
				l.t.Fatalf("advance past iteration %d when V is %d", o.Progress, l.v)
			}
			if want := l.admitted[l.v]; want == nil || o.Contributors.String() != want.String() {
				l.t.Fatalf("iteration %d: contributors %v, admitted %v", l.v, o.Contributors, want)
			}
			if l.bsp && !o.Contributors.Covers(l.alive) {
				l.t.Fatalf("BSP closed iteration %d with %v while %v live", l.v, o.Contributors, l.alive)
			}
			l.v++
		case Answer:
			key := request{o.Rank, o.Progress}
			if !l.waiting[key] {
				l.t.Fatalf("%v, but nobody waits for that", o)
			}
			if l.bsp && o.Progress >= l.v {
				l.t.Fatalf("%v while V is %d", o, l.v)
			}
			delete(l.waiting, key)
		}
	}
	if l.m.V() != l.v || l.m.Parked() != len(l.waiting) {
		l.t.Fatalf("V %d, parked %d; the ledger says %d and %d", l.m.V(), l.m.Parked(), l.v, len(l.waiting))
	}
	return out
}

// finish lets every rank push what others wait for: no pull may remain.
func (l *ledger) finish(n int) {
	l.alive = rankset.Range(n)
	l.step(Live(l.alive))
	var last uint64
	for key := range l.waiting {
		last = max(last, key.progress)
	}
	for l.v <= last {
		before := l.v
		for _, r := range l.m.Missing(l.v).Ranks() {
			if l.v == before {
				l.push(r, before)
			}
		}
		if l.v == before {
			l.t.Fatalf("every live rank has pushed iteration %d and it is still open", before)
		}
	}
	if len(l.waiting) != 0 {
		l.t.Fatalf("V is %d and these pulls still wait: %v", l.v, l.waiting)
	}
}
