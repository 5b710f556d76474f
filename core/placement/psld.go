package placement

import (
	"math"
	"math/rand/v2"
	"slices"
)

// confidence is the number of standard errors on both sides of a mean that has 90 % of the chance (PSLD section 4.2).
const confidence = 1.645

// psld is the strategy of "Elastic Parameter Server Load Distribution" (section 4). It differs from the
// paper where that says two things, or nothing:
//
//   - Section 4.2 defines the superior set: minimal, and every server outside has a lower bound above all upper bounds inside.
//     Algorithm 1 misses that in two ways. It stops at a lower bound that equals the threshold, so that servers that are exactly
//     alike exclude each other; and it stops at the first server outside in the order of upper bounds, behind which a less
//     certain one may overlap with the set. Here the definition holds.
//   - A server is outside only where it is worse by a margin besides. The bounds say how sure a difference is, not that it matters: among many
//     workers, or where they all measure the same, one that is a thousandth slower would get nothing.
//   - Algorithm 1 also ends when no server is left.
//   - The block at hand counts in S_assigned as it does in S_r; else the first one divides by zero.
//   - omega is taken once, at the loads before the remap.
type psld struct {
	epsilon float64 // part of the blocks that explore
	ratio   float64 // theta1 / theta0: what a server's share costs, for its predicted time
	trigger float64 // variation of speeds above which a straggler exists
	scale   float64 // part of the first number of servers below which the superior set asks for one more
	margin  float64 // part by which a predicted time is longer that matters
}

// newPSLD makes PSLD's strategy: partitions in turn at first, then by the profiles of the servers. EPSILON (0.1) of the
// partitions explore, RATIO (1) is theta1/theta0, TRIGGER (1) the variation of speeds that asks for a remap, SCALE (0.5) the
// part of the first servers below which the superior set asks for one more, and MARGIN (0.1) the part by which a server that is not superior is slower.
func newPSLD(a *Arguments) Strategy {
	p := psld{
		epsilon: a.number("EPSILON", 0.1, 1), ratio: a.number("RATIO", 1, 1000), trigger: a.number("TRIGGER", 1, 1000),
		scale: a.number("SCALE", 0.5, 1), margin: a.number("MARGIN", 0.1, 1000),
	}
	s := newRoundRobin(a)
	s.Remap, s.Judge = p.assign, p.judge
	return s
}

// judge is stage 1 and 2 of figure 8. A straggler asks for a remap while it has more than exploration gives it: the paper asks for one at every look, so that
// keys never settle while a straggler stays. Besides, a superior server whose keys take far less time than another's asks for one: it has recovered, and the paper
// does not say what gives it keys again.
func (p psld) judge(s Situation) Verdict {
	superior := s.superior(p.margin)
	straggles := s.variation() > p.trigger
	return Verdict{
		Remap: straggles && s.burdened(p.trigger, superior, p.epsilon) || s.unevenness(superior) > p.trigger,
		Grow:  straggles && float64(len(superior)) < p.scale*float64(s.Initial),
	}
}

// burdened reports whether stragglers have more than twice what exploration gives them in the mean, and one block: servers that are not superior, and slower
// than the fastest by the trigger.
func (s *Situation) burdened(trigger float64, superior []int, epsilon float64) bool {
	var fastest, have float64
	all, slow, loads := weighted(s.Weights), 0, s.loads()
	for _, r := range all {
		if s.Profiles.has(r) {
			fastest = max(fastest, s.Profiles[r].Speed())
		}
	}
	for _, r := range all {
		if s.Profiles.has(r) && !slices.Contains(superior, r) && fastest > (1+trigger)*s.Profiles[r].Speed() {
			slow++
			have += loads[r]
		}
	}
	most := uint64(0)
	for _, b := range s.Blocks {
		most = max(most, b.Bytes)
	}
	return have > 2*epsilon*s.bytes()*float64(slow)/float64(len(all))+float64(most)*min(1, epsilon*float64(len(s.Blocks)))
}

// unevenness is (longest - shortest) / shortest of the predicted times of measured servers at their loads; 0 where fewer than two are.
func (s *Situation) unevenness(servers []int) float64 {
	loads := s.loads()
	shortest, longest := math.Inf(1), 0.
	for _, r := range servers {
		if s.Profiles.has(r) {
			t, _ := s.Profiles.predict(r, loads[r])
			shortest, longest = min(shortest, t), max(longest, t)
		}
	}
	if longest <= shortest {
		return 0
	}
	return (longest - shortest) / shortest
}

// superior is Algorithm 1: the servers of which none is worse by the margin, with 90 % of confidence, than one that is
// in the set. The best is first.
func (s *Situation) superior(margin float64) (set []int) {
	left := weighted(s.Weights)
	share := s.bytes() / float64(len(left))
	for threshold := math.Inf(1); ; {
		best, least := -1, math.Inf(1)
		for k, r := range left {
			mean, sem := s.Profiles.predict(r, share)
			if upper := mean + confidence*sem; mean-confidence*sem <= (1+margin)*threshold && upper < least {
				best, least = k, upper
			}
		}
		if best < 0 {
			return set
		}
		if len(set) == 0 || least > threshold {
			threshold = least
		}
		set = append(set, left[best])
		left = slices.Delete(left, best, best+1)
	}
}

// assign is Algorithm 3: a block explores with the chance epsilon, and goes to the best superior server otherwise.
func (p psld) assign(s Situation) []int {
	rng := rand.New(rand.NewPCG(s.Seed, 0))
	e := exploit{psld: p, Situation: &s, superior: s.superior(p.margin), load: make([]float64, len(s.Weights))}
	e.omega = e.meanTime()
	all := weighted(s.Weights)
	servers := make([]int, len(s.Blocks))
	for i, b := range s.Blocks {
		if rng.Float64() < p.epsilon {
			servers[i] = all[rng.IntN(len(all))]
		} else {
			servers[i] = e.best(float64(b.Bytes))
		}
		e.load[servers[i]] += float64(b.Bytes)
		e.assigned += float64(b.Bytes)
	}
	if p.epsilon*float64(len(s.Blocks)) >= 1 {
		e.measureAll(all, servers)
	}
	return servers
}

// measureAll gives each server a block that chance has left without: keys settle while a straggler stays (judge), and only a server with a key is seen to recover.
func (e *exploit) measureAll(all, servers []int) {
	smallest := largest(len(e.Blocks), func(i int) uint64 { return e.Blocks[i].Bytes })
	slices.Reverse(smallest)
	for _, r := range all {
		if e.load[r] > 0 {
			continue
		}
		for _, i := range smallest {
			if bytes := float64(e.Blocks[i].Bytes); e.load[servers[i]] > bytes {
				e.load[servers[i]] -= bytes
				e.load[r] += bytes
				servers[i] = r
				break
			}
		}
	}
}

// exploit is what Algorithm 2 knows.
type exploit struct {
	psld
	*Situation
	superior []int
	load     []float64 // S_r of the new assignment
	assigned float64
	omega    float64 // mean predicted time of the superior servers at the loads before
}

func (e *exploit) meanTime() float64 {
	loads := e.loads()
	var sum float64
	for _, r := range e.superior {
		mean, _ := e.Profiles.predict(r, loads[r])
		sum += mean / float64(len(e.superior))
	}
	if sum == 0 { // they have nothing yet
		sum, _ = e.Profiles.predict(e.superior[0], max(1, e.bytes()/float64(len(e.superior))))
	}
	return max(sum, 1e-12)
}

// best is Algorithm 2: the superior server of least cost, the last of equals.
func (e *exploit) best(bytes float64) int {
	best, least := e.superior[0], math.Inf(1)
	for _, r := range e.superior {
		load := e.load[r] + bytes
		mean, _ := e.Profiles.predict(r, load)
		cost := mean/e.omega + e.ratio*load/max(1, e.assigned+bytes)
		if cost <= least {
			best, least = r, cost
		}
	}
	return best
}
