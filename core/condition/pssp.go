package condition

import (
	"fmt"
	"math"
	"strconv"
)

// PSSP is the probabilistic model with a constant probability: a worker that leads by s or more is
// delayed with probability c (FluentPS section III-E1). c = 0 is ASP, c = 1 is SSP(s). The setting
// is "pssp:S,C" or "pssp:S,C,SEED".
func PSSP(s uint64, c float64, seed uint64) Model {
	return Model{Name: fmt.Sprintf("pssp:%d,%s", s, seeded(Constant(c), seed)), Pull: Sometimes{s, Constant(c), seed}, Push: EveryLive{}, Dataflow: Accumulate}
}

// DynamicPSSP is the probabilistic model whose probability grows with the lead k, to
// alpha/(1 + e^(s-k)) (FluentPS section III-E2). alpha is a Constant or Significance{}. The setting is
// "dynamic-pssp:S,ALPHA" or "dynamic-pssp:S,ALPHA,SEED", with ALPHA from 0 to 1 or "significance".
func DynamicPSSP(s uint64, alpha Factor, seed uint64) Model {
	return Model{Name: fmt.Sprintf("dynamic-pssp:%d,%s", s, seeded(alpha, seed)), Pull: Sometimes{s, Growing{s, alpha}, seed}, Push: EveryLive{}, Dataflow: Accumulate}
}

func newPSSP(a *Arguments) (Model, error) {
	s, c := a.Iterations("S", 0), a.Probability("C")
	return a.End(PSSP(s, c, a.seed()))
}

func newDynamicPSSP(a *Arguments) (Model, error) {
	s := a.Iterations("S", 0)
	var alpha Factor = Significance{}
	if !a.Word(alpha.String()) {
		alpha = Constant(a.Probability("ALPHA"))
	}
	return a.End(DynamicPSSP(s, alpha, a.seed()))
}

// seeded is a factor and a seed of a setting.
func seeded(f Factor, seed uint64) string {
	if seed == 0 {
		return f.String()
	}
	return fmt.Sprintf("%s,%d", f, seed)
}

// Factor is a number from 0 to 1, the factor of a probability.
type Factor interface {
	Of(v View) float64
	String() string
}

// Constant is one number for every view.
type Constant float64

// Of implements Factor.
func (c Constant) Of(View) float64 { return float64(c) }

func (c Constant) String() string { return strconv.FormatFloat(float64(c), 'g', -1, 64) }

// Significance is |g|/|w| of the worker's newest push, clipped to 1.
type Significance struct{}

// Of implements Factor. NaN counts as 0, which delays nothing.
func (Significance) Of(v View) float64 {
	if g := float64(v.Significance); g > 0 {
		return min(g, 1)
	}
	return 0
}

func (Significance) String() string { return "significance" }

// Growing is Alpha/(1 + e^(S-k)) at a lead of k: Alpha/2 at k = S, towards Alpha further on.
type Growing struct {
	S     uint64
	Alpha Factor
}

// Of implements Factor.
func (g Growing) Of(v View) float64 {
	k := float64(v.Progress) - float64(v.V)
	return g.Alpha.Of(v) / (1 + math.Exp(float64(g.S)-k))
}

func (g Growing) String() string { return fmt.Sprintf("%s/(1 + e^(%d - k))", g.Alpha, g.S) }

// Sometimes delays a pull that Within{S} would delay, but only with probability P.
type Sometimes struct {
	S    uint64
	P    Factor
	Seed uint64
}

// Holds implements PullCondition.
func (c Sometimes) Holds(v View) bool {
	return Within{c.S}.Holds(v) || draw(c.Seed, v.Rank, v.Progress) >= c.P.Of(v)
}

// Ahead implements PullCondition.
func (c Sometimes) Ahead() bool { return c.S > 0 || c.P != Constant(1) }

// Bound implements Bounded: at a probability of 1 this is SSP.
func (c Sometimes) Bound() (uint64, bool) { return c.S, c.P == Constant(1) }

// Narrow implements Narrow.
func (c Sometimes) Narrow() bool { return !c.AsksSignificance() }

// AsksSignificance implements Significant.
func (c Sometimes) AsksSignificance() bool {
	g, ok := c.P.(Growing)
	return ok && g.Alpha == Significance{}
}

func (c Sometimes) String() string { return fmt.Sprintf("i < V + %d or rand() >= %s", c.S, c.P) }

// draw is the random number in [0, 1) of a worker's iteration. Every key on every server draws the same; otherwise,
// with M keys, some key would block with probability 1 - (1-c)^M.
func draw(seed uint64, rank int, progress uint64) float64 {
	return float64(scramble(scramble(scramble(seed)+uint64(rank))+progress)>>11) / (1 << 53)
}

// scramble is one step of the SplitMix64 generator (Steele, Lea, Flood 2014).
func scramble(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
