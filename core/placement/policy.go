package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/nearest"
	"github.com/paceline/paceline/internal/setting"
)

// Load is a tensor to be placed.
type Load struct {
	Number uint32   // of the tensor, which it keeps
	Parts  []uint32 // bytes of each partition, as the policy's Cut gives them
	Home   int      // server that partition 0 must go to, or Free
}

// Free is the Home of a tensor whose first partition may go anywhere.
const Free = -1

// Placer assigns partitions to servers and records the load of each.
type Placer interface {
	// Place assigns a server to every partition of every tensor, in the order of the arguments. Place tensors
	// together that are declared together: a placer may examine all of them first.
	Place(tensors []Load) [][]int
	// Add records a placement made elsewhere: before a restart of the scheduler, or in an earlier epoch.
	Add(parts []uint32, servers []int)
	// Remove forgets a placement of Place or Add.
	Remove(parts []uint32, servers []int)
}

// Strategy is what a policy decides.
type Strategy struct {
	// Over makes a placer over one server per weight; those of weight 0 get only tensors whose home they are.
	Over func(weights []float64) Placer
	// Width is how many of the servers a tensor is cut for. Nil: all of them.
	Width func(bytes uint64, servers int) int
	// Least is the least partition, in bytes, of a tensor that is cut only to spread it. 0: limits.MinPartition.
	Least int
	// Remap finds the server of every block when an epoch begins. Nil: a block stays as long as its server does.
	Remap func(Situation) []int
	// Judge says what the profiles of the servers ask for while members stay. Nil: nothing.
	Judge func(Situation) Verdict
}

// Policy is a strategy for the placement of keys, by the setting that names it.
type Policy struct {
	Name     string // as a setting writes it, so that Parse makes the same policy of it
	strategy Strategy
}

// Arguments are the part of a setting behind a policy's name. Getters read them one by one; the first faulty one
// is the error, and values read after it are undefined.
type Arguments struct{ setting.Arguments }

// number reads an optional number from 0 to most.
func (a *Arguments) number(name string, otherwise, most float64) float64 {
	if !a.More() {
		return otherwise
	}
	return a.Number(name, 0, most)
}

// A builder makes a policy's strategy from the arguments behind its name.
type builder struct {
	usage string // the name, or the name, a colon and the arguments
	build func(*Arguments) Strategy
}

func (b builder) name() string {
	name, _, _ := strings.Cut(b.usage, ":")
	return name
}

// builders is the table of policies. A new policy is one file and one line here, or one call of Register.
var builders = []builder{
	{"round-robin", newRoundRobin},
	{"largest-first", newLargestFirst},
	{"uniform", newUniform},
	{"tensor-round-robin", newTensorRoundRobin},
	{"eps", newEPS},
	{"mxnet:BOUND", newMXNet},
	{"tensorflow", newTensorFlow},
	{"optimus", newOptimus},
	{"proportional:TRIGGER", newProportional},
	{"psld:EPSILON,RATIO,TRIGGER,SCALE,MARGIN", newPSLD},
}

// Register adds a policy to those of Parse: usage is its form in a setting, "mxnet:BOUND", and build makes its strategy
// of the arguments. Call it from the init function of a package that every process of the job imports. It panics if the
// name is in use.
func Register(usage string, build func(*Arguments) Strategy) {
	b := builder{usage, build}
	if slices.Contains(Names(), b.name()) {
		panic(fmt.Sprintf("placement: the policy %q is registered twice", b.name()))
	}
	builders = append(builders, b)
}

// Default is the policy without a setting. In the modularized parameter server's measurements it is the best and the most
// stable one on average.
const Default = "largest-first"

// Names lists the policies that Parse knows.
func Names() []string { return each.Of(builders, builder.name) }

// Parse makes the policy that a setting names, with its arguments behind a colon; "" is Default. Each policy's file
// describes its arguments.
func Parse(text string) (Policy, error) {
	text = cmp.Or(text, Default)
	name, _, _ := strings.Cut(text, ":")
	for _, b := range builders {
		if b.name() == name {
			a := Arguments{setting.Read("placement", text, b.usage)}
			p := Policy{text, b.build(&a)}
			return p, a.Err()
		}
	}
	return Policy{}, fmt.Errorf("unknown placement %q, %s", text, nearest.Known(name, Names()))
}

// Cut is the package's Cut for tensors that the policy places.
func (p Policy) Cut(total uint64, elem, partBytes, servers int, slices []int64) []uint32 {
	if p.strategy.Width != nil {
		servers = p.strategy.Width(total, servers)
	}
	return cut(total, elem, partBytes, servers, cmp.Or(p.strategy.Least, limits.MinPartition), slices)
}

// Over makes the policy's placer over one server per weight. A server's share is proportional to its
// weight; one of weight 0 gets only tensors whose home it is.
func (p Policy) Over(weights []float64) (Placer, error) {
	if err := checkWeights(weights); err != nil {
		return nil, err
	}
	return p.strategy.Over(slices.Clone(weights)), nil
}

// Remaps reports whether the policy decides on every key when an epoch begins, and not only on those without a server.
func (p Policy) Remaps() bool { return p.strategy.Remap != nil }

// Remap finds the server of every block. A policy that does not decide that gives all equal bytes, with as few moves as that takes (EPS).
func (p Policy) Remap(s Situation) ([]int, error) {
	if err := checkWeights(s.Weights); err != nil {
		return nil, err
	}
	if p.strategy.Remap == nil {
		return s.even(s.Weights), nil
	}
	return p.strategy.Remap(s), nil
}

// Judges reports whether the policy asks for anything by the profiles of the servers.
func (p Policy) Judges() bool { return p.strategy.Judge != nil }

// Judge says what the profiles of the servers ask for while members stay.
func (p Policy) Judge(s Situation) Verdict {
	if p.strategy.Judge == nil {
		return Verdict{}
	}
	return p.strategy.Judge(s)
}

func checkWeights(weights []float64) error {
	if len(weights) == 0 || len(weights) > limits.MaxServers {
		return fmt.Errorf("placement over %d servers, allowed are 1 to %d", len(weights), limits.MaxServers)
	}
	var sum float64
	for s, w := range weights {
		if !(w >= 0) || math.IsInf(w, 1) {
			return fmt.Errorf("weight %v of server %d must be a number of at least 0", w, s)
		}
		sum += w
	}
	if sum == 0 || math.IsInf(sum, 1) {
		return fmt.Errorf("weights of the %d servers sum to %v: at least one must be above 0, and the sum finite", len(weights), sum)
	}
	return nil
}
