package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
)

// Load is a tensor to be placed.
type Load struct {
	Parts []uint32 // bytes of each partition, as Cut gives them
	Home  int      // server that partition 0 must go to, or Free
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

// Policy is a strategy for the placement of keys.
type Policy struct {
	Name string // as a setting writes it, so that Parse makes the same policy of it
	over func(weights []float64) Placer
}

// Build makes a policy's placers from the arguments behind its name in a setting.
type Build func(arguments string) (func(weights []float64) Placer, error)

type builder struct {
	name  string
	build Build
}

// builders is the table of policies. A new policy is one file and one line here, or one call of Register.
var builders = []builder{
	{"round-robin", newRoundRobin},
	{"largest-first", newLargestFirst},
}

// Register adds a policy from outside this package. It is for init functions; a name in use panics.
func Register(name string, build Build) {
	if slices.Contains(Names(), name) {
		panic(fmt.Sprintf("placement: the policy %q is registered twice", name))
	}
	builders = append(builders, builder{name, build})
}

// Default is the policy without a setting. In the papers' measurements it is the best and the most stable one
// on average (algorithms.md, section 2).
const Default = "largest-first"

// Names lists the policies that Parse knows.
func Names() []string { return each.Of(builders, func(b builder) string { return b.name }) }

// Parse makes the policy that a setting names, with its arguments behind a colon; "" is Default.
func Parse(setting string) (Policy, error) {
	setting = cmp.Or(setting, Default)
	name, arguments, _ := strings.Cut(setting, ":")
	for _, b := range builders {
		if b.name == name {
			over, err := b.build(arguments)
			if err != nil {
				return Policy{}, fmt.Errorf("placement %q: %w", setting, err)
			}
			return Policy{setting, over}, nil
		}
	}
	return Policy{}, fmt.Errorf("unknown placement %q, known are: %s", setting, strings.Join(Names(), ", "))
}

// Over makes the policy's placer over one server per weight. A server's share is proportional to its
// weight; one of weight 0 gets only tensors whose home it is.
func (p Policy) Over(weights []float64) (Placer, error) {
	if len(weights) == 0 || len(weights) > limits.MaxServers {
		return nil, fmt.Errorf("placement over %d servers, allowed are 1 to %d", len(weights), limits.MaxServers)
	}
	var sum float64
	for s, w := range weights {
		if !(w >= 0) || math.IsInf(w, 1) {
			return nil, fmt.Errorf("weight %v of server %d must be a number of at least 0", w, s)
		}
		sum += w
	}
	if sum == 0 || math.IsInf(sum, 1) {
		return nil, fmt.Errorf("weights of the %d servers sum to %v: at least one must be above 0, and the sum finite", len(weights), sum)
	}
	return p.over(slices.Clone(weights)), nil
}

// noArguments is for policies that have none.
func noArguments(arguments string) error {
	if arguments != "" {
		return fmt.Errorf("it has no arguments, got %q", arguments)
	}
	return nil
}
