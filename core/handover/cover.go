package handover

import (
	"cmp"
	"slices"

	"github.com/paceline/paceline/core/condition"
)

// Cover says what a held value has in it. A server has one history, so of two of its values the later one covers what the earlier one does.
type Cover struct {
	Closed uint64    // iterations: V
	Ranks  []Covered // who had declared the value, by rank
}

// Covered is what a value has of a rank.
type Covered struct {
	Rank   int
	Next   uint64 // its operations before this one have been admitted, or dropped for good
	Pushed uint64 // how many iterations it has pushed
}

// find is the place of a rank, and whether it is there.
func (c *Cover) find(rank int) (int, bool) {
	return slices.BinarySearchFunc(c.Ranks, rank, func(r Covered, rank int) int { return cmp.Compare(r.Rank, rank) })
}

// Declare adds a rank of which the value has nothing yet.
func (c *Cover) Declare(rank int) {
	if i, ok := c.find(rank); !ok {
		c.Ranks = slices.Insert(c.Ranks, i, Covered{Rank: rank})
	}
}

// Has reports whether a push is in it.
func (c *Cover) Has(rank int, operation uint64) bool {
	i, ok := c.find(rank)
	return ok && operation < c.Ranks[i].Next
}

// Push notes a push, of which it has been decided whether it counts. A push within a superstep ends no iteration.
func (c *Cover) Push(rank int, operation, iteration uint64, within bool) {
	c.Declare(rank)
	i, _ := c.find(rank)
	r := &c.Ranks[i]
	r.Next = max(r.Next, operation+1)
	if !within {
		r.Pushed = max(r.Pushed, iteration+1)
	}
}

// Clone is a copy that does not change with it.
func (c *Cover) Clone() Cover { return Cover{c.Closed, slices.Clone(c.Ranks)} }

// operations is how many the value covers of all ranks: by that one is later than another.
func (c *Cover) operations() (n uint64) {
	for _, r := range c.Ranks {
		n += r.Next
	}
	return n
}

// furthestBack is how many closed iterations are stepped again for ranks that have not pushed them: their lead counts in some conditions.
const furthestBack = 1 << 10

// Resume makes the machine of a value with this cover: as if the pushes had come now, those of an earlier iteration first.
func (c *Cover) Resume(config condition.Config) (*condition.Machine, error) {
	var end uint64
	config.Start = c.Closed
	for _, r := range c.Ranks {
		if config.Live.Has(r.Rank) {
			config.Start, end = min(config.Start, r.Pushed), max(end, r.Pushed)
		}
	}
	if c.Closed > furthestBack {
		config.Start = max(config.Start, c.Closed-furthestBack)
	}
	m, err := condition.New(config)
	if err != nil {
		return nil, err
	}
	var out []condition.Output
	for iteration := config.Start; iteration < end; iteration++ {
		for _, r := range c.Ranks {
			if iteration < r.Pushed {
				out = m.Step(condition.Push(r.Rank, iteration, 0), out[:0])
			}
		}
	}
	return m, nil
}
