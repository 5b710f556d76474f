package condition

import (
	"slices"
	"testing"

	"github.com/paceline/paceline/internal/invariant"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
)

func TestModelNeedsBothConditions(t *testing.T) {
	if _, err := New(Config{Model: Model{Name: "half", Pull: Closed{}}}); err == nil {
		t.Fatal("a model without a push condition must be refused")
	}
}

// A condition sees progress, rank, V, N, count, the fastest and slowest progress and the push's
// significance (FluentPS section III-B).
func TestConditionSeesEveryonesProgress(t *testing.T) {
	spy := &spy{}
	m, err := New(Config{Live: rankset.Range(3), Model: Model{Name: "spy", Pull: spy, Push: EveryLive{}}, Dataflow: Accumulate})
	if err != nil {
		t.Fatal(err)
	}
	for _, in := range []Input{Push(1, 0, 0.25), Push(1, 1, 0.5), Push(0, 0, 0), Push(2, 0, 0), Push(2, 1, 0)} {
		m.Step(in, nil)
	}
	m.Step(Pull(1, 1), nil)
	v := spy.saw
	if v.Rank != 1 || v.Progress != 1 || v.V != 1 || v.N != 3 || v.Fastest != 2 || v.Slowest != 1 || v.Significance != 0.5 {
		t.Errorf("saw %+v", v)
	}
	if v.Count(0) != 0 || v.Count(1) != 2 || v.Count(2) != 0 || (View{}).Count(0) != 0 {
		t.Errorf("counts %d %d %d", v.Count(0), v.Count(1), v.Count(2))
	}
}

type spy struct{ saw View }

func (s *spy) Holds(v View) bool { s.saw = v; return true }
func (s *spy) Ahead() bool       { return true }
func (s *spy) String() string    { return "always" }

func TestBSPIterationAllocatesNothing(t *testing.T) {
	if invariant.On {
		t.Skip("the checks allocate")
	}
	iteration := bspIteration(t, 8)
	if n := testing.AllocsPerRun(100, iteration); n != 0 {
		t.Errorf("an iteration allocates %v times", n)
	}
}

func BenchmarkBSPIteration8Ranks(b *testing.B) {
	iteration := bspIteration(b, 8)
	b.ReportAllocs()
	for b.Loop() {
		iteration()
	}
}

// bspIteration is one BSP iteration of n ranks, run once already.
func bspIteration(t testing.TB, n int) func() {
	m, err := New(Config{Live: rankset.Range(n), Model: BSP()})
	if err != nil {
		t.Fatal(err)
	}
	var out []Output
	iteration := func() {
		v := m.V()
		for r := range n {
			out = m.Step(Push(r, v, 0), out[:0])
			out = m.Step(Pull(r, v), out[:0])
		}
	}
	iteration()
	return iteration
}

// A straggler gets the sums that closed without it, as long as they are kept (decision 41): none is left further behind.
func TestASumClosesWithoutARankForAsLongAsItIsKept(t *testing.T) {
	push, err := ParsePush("count[V] >= N - 1")
	if err != nil {
		t.Fatal(err)
	}
	for flow, most := range map[Dataflow]uint64{Aggregate: limits.MaxKept, Accumulate: limits.MaxKept + 10} {
		m, err := New(Config{Live: rankset.Range(3), Model: Model{Name: "late", Pull: Closed{}, Push: push}, Dataflow: flow})
		if err != nil {
			t.Fatal(err)
		}
		for i := range uint64(limits.MaxKept + 10) {
			m.Step(Push(0, i, 0), nil)
			m.Step(Push(1, i, 0), nil)
		}
		if m.V() != most {
			t.Errorf("%v: %d iterations have closed, want %d", flow, m.V(), most)
		}
		for i := range uint64(10) {
			m.Step(Push(2, i, 0), nil)
		}
		if m.V() != limits.MaxKept+10 {
			t.Errorf("%v: %d iterations have closed when the straggler has come closer", flow, m.V())
		}
	}
}

// A push is refused MaxLead iterations ahead, so that a rank waits before, under every model.
func TestARankWaitsBeforeItsPushWouldBeRefused(t *testing.T) {
	m, err := New(Config{Live: rankset.Range(2), Model: ASP(), Dataflow: Accumulate})
	if err != nil {
		t.Fatal(err)
	}
	kinds := func(out []Output) (kinds []OutputKind) {
		for _, o := range out {
			kinds = append(kinds, o.Kind)
		}
		return kinds
	}
	m.Step(Push(0, 0, 0), nil)
	last := uint64(MaxLead - 1)
	for i, want := range map[uint64]OutputKind{last - 1: Answer, last: Park} {
		if got := kinds(m.Step(Push(0, i, 0), nil)); !slices.Equal(got, []OutputKind{Admit}) {
			t.Errorf("push %d: %v", i, got)
		}
		if got := kinds(m.Step(Pull(0, i), nil)); !slices.Equal(got, []OutputKind{want}) {
			t.Errorf("pull %d: %v, want %v", i, got, want)
		}
	}
	if got := kinds(m.Step(Push(1, 0, 0), nil)); !slices.Equal(got, []OutputKind{Admit, Advance, Answer}) {
		t.Errorf("the other's push: %v", got)
	}
	if got := kinds(m.Step(Push(0, last+1, 0), nil)); !slices.Equal(got, []OutputKind{Admit}) {
		t.Errorf("push %d: %v", last+1, got)
	}
}
