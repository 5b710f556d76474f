package placement

import (
	"math"
	"math/rand/v2"
	"slices"
)

// confidence is the number of standard errors on both sides of a mean that has 90 % of the chance (PSLD section 4.2).
const confidence = 1.645

// psld is the strategy of "Elastic Parameter Server Load Distribution" (section 4; algorithms.md section 4). It differs from the
// paper where that says two things, or nothing:
//
//   - Section 4.2 defines the superior set: minimal, and every server outside has a lower bound above all upper bounds inside.
//     Algorithm 1 misses that in two ways. It stops at a lower bound that equals the threshold, so that servers that are exactly
//     alike exclude each other; and it stops at the first server outside in the order of upper bounds, behind which a less
//     certain one may overlap with the set. Here the definition holds.
//   - Algorithm 1 also ends when no server is left.
//   - The block at hand counts in S_assigned as it does in S_r; else the first one divides by zero.
//   - omega is taken once, at the loads before the remap.
type psld struct {
	epsilon float64 // part of the blocks that explore
	ratio   float64 // theta1 / theta0: what a server's share costs, for its predicted time
	trigger float64 // variation of speeds above which a straggler exists
	scale   float64 // part of the first number of servers below which the superior set asks for one more
}

// newPSLD makes PSLD's strategy: partitions in turn at first, then by the profiles of the servers. EPSILON (0.1) of the
// partitions explore, RATIO (1) is theta1/theta0, TRIGGER (1) the variation of speeds that asks for a remap, and SCALE (0.5) the
// part of the first servers below which the superior set asks for one more.
func newPSLD(a *Arguments) Strategy {
	p := psld{epsilon: a.number("EPSILON", 0.1, 1), ratio: a.number("RATIO", 1, 1000), trigger: a.number("TRIGGER", 1, 1000), scale: a.number("SCALE", 0.5, 1)}
	s := newRoundRobin(a)
	s.Remap, s.Judge = p.assign, p.judge
	return s
}

// judge is stage 1 and 2 of figure 8. Besides a straggler, a superior server whose keys take far less time than another's asks for a
// remap: it has recovered, and the paper does not say what gives it keys again.
func (p psld) judge(s Situation) Verdict {
	superior := s.superior()
	if s.variation() > p.trigger {
		return Verdict{Remap: true, Grow: float64(len(superior)) < p.scale*float64(s.Initial)}
	}
	return Verdict{Remap: s.unevenness(superior) > p.trigger}
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

// superior is Algorithm 1: the servers of which none is worse, with 90 % of confidence, than one that is
// in the set. The best is first.
func (s *Situation) superior() (set []int) {
	left := weighted(s.Weights)
	share := s.bytes() / float64(len(left))
	for threshold := math.Inf(1); ; {
		best, least := -1, math.Inf(1)
		for k, r := range left {
			mean, sem := s.Profiles.predict(r, share)
			if upper := mean + confidence*sem; mean-confidence*sem <= threshold && upper < least {
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
	e := exploit{psld: p, Situation: &s, superior: s.superior(), load: make([]float64, len(s.Weights))}
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
	return servers
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
