package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/paceline/paceline/internal/limits"
)

// Load is a tensor to be placed.
type Load struct {
	Parts []uint32 // bytes of each partition, as Cut gives them
	Home  int      // server that partition 0 must go to, or Free
}

// Free is the Home of a tensor whose first partition may go anywhere.
const Free = -1

// Placer gives partitions to servers and remembers what each server holds.
type Placer interface {
	// Place gives a server to every partition of every tensor, in the order of the arguments. Tensors
	// that are declared together should be placed together: a placer may look at all of them first.
	Place(tensors []Load) [][]int
	// Add takes account of a placement that was made elsewhere: before the scheduler was restarted.
	Add(parts []uint32, servers []int)
	// Remove forgets a placement that Place or Add has made.
	Remove(parts []uint32, servers []int)
}

// strategies is the table of placers. A new one is a file and a line here, or, where it deals as the
// others do, the line alone.
func strategies() []strategy {
	return []strategy{
		// Partitions in turn, whatever their size.
		{"round-robin", func(w []float64) Placer { return newDealer(w, func(uint32) float64 { return 1 }, false) }},
		// The modularized parameter server's heuristic: the largest first, onto the least loaded.
		{"largest-first", func(w []float64) Placer { return newDealer(w, frameBytes, true) }},
	}
}

type strategy struct {
	name string
	make func(weights []float64) Placer
}

// frameBytes is what a partition costs on the wire: its bytes and a header. Without the header all
// empty partitions would lie on one server.
func frameBytes(part uint32) float64 { return float64(part) + 64 }

// Names lists the placers that New knows.
func Names() []string {
	var names []string
	for _, s := range strategies() {
		names = append(names, s.name)
	}
	return names
}

// New makes the placer of that name over one server per weight. A server's share is proportional to
// its weight; one of weight 0 gets only tensors whose home it is.
func New(name string, weights []float64) (Placer, error) {
	if len(weights) == 0 || len(weights) > limits.MaxServers {
		return nil, fmt.Errorf("placement over %d servers, allowed are 1 to %d", len(weights), limits.MaxServers)
	}
	var sum float64
	for s, w := range weights {
		if !(w >= 0) || math.IsInf(w, 1) {
			return nil, fmt.Errorf("weight %v of server %d must be a number from 0 on", w, s)
		}
		sum += w
	}
	if sum == 0 || math.IsInf(sum, 1) {
		return nil, fmt.Errorf("weights of the %d servers sum to %v: at least one must be above 0, and all within reason", len(weights), sum)
	}
	for _, s := range strategies() {
		if s.name == name {
			return s.make(weights), nil
		}
	}
	return nil, fmt.Errorf("unknown placement %q, known are: %s", name, strings.Join(Names(), ", "))
}

// Even is the weights of n equal servers.
func Even(n int) []float64 { return slices.Repeat([]float64{1}, n) }

// dealer deals a tensor's partitions like cards: every server gets its whole share of them, and what
// remains goes to the servers that are least loaded for their weight. So a tensor spreads over all
// servers, and of equal servers the most and the least loaded differ by no more than the largest
// partition (dealer's test shows both).
type dealer struct {
	weights []float64
	total   float64
	load    []float64 // cost of what each server holds
	cost    func(part uint32) float64
	sorted  bool // place the largest tensors of a batch first
}

func newDealer(weights []float64, cost func(uint32) float64, sorted bool) *dealer {
	d := &dealer{weights: slices.Clone(weights), load: make([]float64, len(weights)), cost: cost, sorted: sorted}
	for _, w := range weights {
		d.total += w
	}
	return d
}

// Place implements Placer.
func (d *dealer) Place(tensors []Load) [][]int {
	order := make([]int, len(tensors))
	for i := range order {
		order[i] = i
	}
	if d.sorted {
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(bytes(tensors[b]), bytes(tensors[a])) })
	}
	placed := make([][]int, len(tensors))
	for _, i := range order {
		placed[i] = d.deal(tensors[i])
		d.Add(tensors[i].Parts, placed[i])
	}
	return placed
}

// Add implements Placer.
func (d *dealer) Add(parts []uint32, servers []int) {
	for i, s := range servers {
		d.load[s] += d.cost(parts[i])
	}
}

// Remove implements Placer.
func (d *dealer) Remove(parts []uint32, servers []int) {
	for i, s := range servers {
		d.load[s] -= d.cost(parts[i])
	}
}

// deal chooses the servers of one tensor's partitions.
func (d *dealer) deal(t Load) []int {
	if len(t.Parts) == 0 {
		return nil
	}
	hands, left := d.shares(len(t.Parts))
	if t.Home != Free && hands[t.Home] == 0 {
		if left--; left < 0 {
			left = 0
			hands[most(hands)]--
		}
		hands[t.Home] = 1
	}
	ranking := d.ranking(hands, d.cost(t.Parts[0]))
	for _, s := range ranking {
		if left > 0 && hands[s] == int(d.share(s, len(t.Parts))) {
			hands[s]++ // but not a home that was given one above
			left--
		}
	}
	start := t.Home
	if start == Free {
		start = ranking[0]
	}
	return inTurn(hands, start, len(t.Parts))
}

// share is how many of n partitions are server s's by its weight.
func (d *dealer) share(s, n int) float64 { return math.Floor(float64(n) * d.weights[s] / d.total) }

// shares is everybody's share, and how many of the n partitions are left over.
func (d *dealer) shares(n int) (hands []int, left int) {
	hands, left = make([]int, len(d.weights)), n
	for s := range hands {
		hands[s] = min(int(d.share(s, n)), left)
		left -= hands[s]
	}
	return hands, left
}

// ranking lists the servers of weight above 0 by how loaded they would be, for their weight, with
// their hands and one partition more of that cost.
func (d *dealer) ranking(hands []int, cost float64) []int {
	var order []int
	after := make([]float64, len(hands))
	for s, w := range d.weights {
		if w > 0 {
			after[s] = (d.load[s] + float64(hands[s]+1)*cost) / w
			order = append(order, s)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(after[a], after[b]) })
	return order
}

// inTurn lays the n partitions in hands out so that neighbours go to different servers, from start on.
func inTurn(hands []int, start, n int) []int {
	servers := make([]int, 0, n)
	for s := start; len(servers) < n; s = (s + 1) % len(hands) {
		if hands[s] > 0 {
			hands[s]--
			servers = append(servers, s)
		}
	}
	return servers
}

func most(hands []int) (server int) {
	for s, h := range hands {
		if h > hands[server] {
			server = s
		}
	}
	return server
}

func bytes(t Load) (sum uint64) {
	for _, p := range t.Parts {
		sum += uint64(p)
	}
	return sum
}
