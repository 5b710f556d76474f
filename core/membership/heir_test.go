package membership

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// Whatever the order in which servers are lost, and whoever hears of several at once: a key has the same heir, which is live, and only the keys of
// a lost server move, to all others alike.
func TestHeirsDoNotDependOnTheOrderOfLosses(t *testing.T) {
	const servers, keys = 6, 6000
	random := rand.New(rand.NewPCG(1, 2))
	e := &Epoch{Servers: make([]Server, servers)}
	heirs := func() (all []int) {
		for key := range keys {
			all = append(all, e.Heir(Key{Name: Name{Set: 1, Name: fmt.Sprint("tensor ", key/3)}, Part: key % 3}, key%servers))
		}
		return all
	}
	before := heirs()
	for _, lost := range random.Perm(servers)[:servers-1] {
		e.Servers[lost].State = Gone
		now := heirs()
		for key, s := range now {
			if before[key] != lost && s != before[key] || e.Servers[s].State != Live {
				t.Fatalf("key %d goes from server %d to %d with the loss of %d", key, before[key], s, lost)
			}
		}
		left := float64(0)
		for i := range e.Servers {
			if e.Servers[i].State == Live {
				left++
			}
		}
		for i := range e.Servers {
			if n := len(slices.DeleteFunc(slices.Clone(now), func(s int) bool { return s != i })); e.Servers[i].State == Live && (float64(n) < 0.85*keys/left || float64(n) > 1.15*keys/left) {
				t.Errorf("%d keys on server %d of %v", n, i, left)
			}
		}
		before = now
	}
}
