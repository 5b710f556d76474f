package sim

import (
	"slices"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/placement"
)

// Layout is the keys of a model's tensors, of float32 elements, in the order in which a worker pushes them: the last tensor's first. Tensors are cut
// to be spread over `spread` servers; with 1 only into partitions of partBytes, which are PSLD's units.
func Layout(policy placement.Policy, elements []int, servers, spread, partBytes int) ([]Key, error) {
	placer, err := policy.Over(placement.Even(servers))
	if err != nil {
		return nil, err
	}
	loads := make([]placement.Load, len(elements))
	for i, n := range elements {
		loads[i] = placement.Load{Number: uint32(i), Parts: policy.Cut(4*uint64(n), 4, partBytes, spread, nil), Home: placement.Free}
	}
	placed := placer.Place(loads)
	var layout []Key
	for i := len(loads) - 1; i >= 0; i-- {
		for part, server := range placed[i] {
			layout = append(layout, Key{Server: server, Bytes: int64(loads[i].Parts[part])})
		}
	}
	return layout, nil
}

// Server is what a server of a Job can do.
type Server struct{ Link, Processor Bandwidth }

// Job is a job under BSP whose keys move between iterations, as its placement decides by what its workers have measured: Scenario
// is one iteration, which is played again and again. Servers may change between iterations.
//
// It leaves out what happens at the boundary of two iterations: all workers begin the next one together. An iteration is simulated
// once for as long as nothing changes, so computing times must be constant.
type Job struct {
	Scenario Scenario // of every iteration
	Servers  []Server // as they are now
	Policy   placement.Policy
	Period   time.Duration // between two looks at the profiles; 0: after every iteration
	Newcomer Server        // what a server can do that is added
	Most     int           // servers, where the policy wants one more; less than there are: none is added

	Now      time.Duration
	Remaps   int
	Boundary time.Duration // of the newest iteration: from when the first worker has ended it until the last one has

	profiles placement.Profiles
	fits     []placement.Fit // since the newest look, by server and rank
	initial  int             // number of servers at the beginning
	looked   time.Duration
	played   played
}

// played is the newest simulated iteration.
type played struct {
	layout   []Key
	servers  []Server
	took     time.Duration
	boundary time.Duration
	busy     []measured // by server and rank
}

type measured struct {
	bytes, seconds float64
	ok             bool
}

// Iterate plays an iteration and returns its time. When a period has passed, the policy looks at the profiles first.
func (j *Job) Iterate() (time.Duration, error) {
	if j.initial == 0 {
		j.initial = len(j.Servers)
	}
	if j.Now > 0 && j.Now-j.looked >= j.Period {
		if err := j.look(); err != nil {
			return 0, err
		}
	}
	if !slices.Equal(j.played.layout, j.Scenario.Layout) || !slices.Equal(j.played.servers, j.Servers) {
		if err := j.play(); err != nil {
			return 0, err
		}
	}
	for len(j.fits) < len(j.played.busy) {
		j.fits = append(j.fits, placement.Fit{})
	}
	for i, m := range j.played.busy {
		if m.ok {
			j.fits[i].Add(m.bytes, m.seconds)
		}
	}
	j.Now += j.played.took
	j.Boundary = j.played.boundary
	return j.played.took, nil
}

// Loads is the bytes on each server.
func (j *Job) Loads() []int64 {
	loads := make([]int64, len(j.Servers))
	for _, k := range j.Scenario.Layout {
		loads[k.Server] += k.Bytes
	}
	return loads
}

// play simulates an iteration, with the meters of every worker.
func (j *Job) play() error {
	s := j.Scenario
	s.Iterations, s.Model, s.Servers = 1, condition.BSP(), len(j.Servers)
	s.ServerLinks, s.ServerProcessors = nil, nil
	for _, server := range j.Servers {
		s.ServerLinks = append(s.ServerLinks, server.Link)
		s.ServerProcessors = append(s.ServerProcessors, server.Processor)
	}
	meters := make([]placement.Meter, len(j.Servers)*s.Workers)
	ends := make([]time.Duration, s.Workers)
	s.Observe = func(rank, key int, e placement.Exchange) {
		meters[s.Layout[key].Server*s.Workers+rank].Add(e)
		ends[rank] = max(ends[rank], e.Ended)
	}
	r, err := Run(s)
	if err != nil {
		return err
	}
	j.played = played{layout: slices.Clone(s.Layout), servers: slices.Clone(j.Servers), took: time.Duration(r.Seconds * float64(time.Second)),
		boundary: slices.Max(ends) - slices.Min(ends)}
	for i := range meters {
		var m measured
		m.bytes, m.seconds, m.ok = meters[i].End()
		j.played.busy = append(j.played.busy, m)
	}
	return nil
}

// look has the policy judge the profiles, as the scheduler does: a server that nobody has measured since the last look keeps its old profile.
func (j *Job) look() error {
	j.looked = j.Now
	j.profiles = append(j.profiles, make(placement.Profiles, len(j.Servers)-len(j.profiles))...)
	for server := range j.Servers {
		var profile placement.Profile
		for rank := range j.Scenario.Workers {
			if i := server*j.Scenario.Workers + rank; i < len(j.fits) {
				if sample, ok := j.fits[i].Sample(); ok {
					profile = append(profile, sample)
				}
			}
		}
		if len(profile) > 0 {
			j.profiles[server] = profile
		}
	}
	j.fits = j.fits[:0]
	verdict := j.Policy.Judge(j.situation())
	grows := verdict.Grow && len(j.Servers) < j.Most
	if grows {
		j.Servers = append(slices.Clone(j.Servers), j.Newcomer)
	}
	if !verdict.Remap && !grows || !j.Policy.Remaps() {
		return nil
	}
	return j.remap()
}

func (j *Job) situation() placement.Situation {
	s := placement.Situation{Weights: placement.Even(len(j.Servers)), Profiles: j.profiles, Initial: j.initial, Seed: j.Scenario.Seed<<32 + uint64(j.Now)}
	for _, k := range j.Scenario.Layout {
		s.Blocks = append(s.Blocks, placement.Block{Bytes: uint64(k.Bytes), Server: k.Server})
	}
	return s
}

func (j *Job) remap() error {
	servers, err := j.Policy.Remap(j.situation())
	if err != nil {
		return err
	}
	layout := slices.Clone(j.Scenario.Layout)
	for i := range layout {
		layout[i].Server = servers[i]
	}
	j.Scenario.Layout = layout
	j.Remaps++
	return nil
}
