package scheduler

import (
	"fmt"
	"maps"
	"slices"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport/wire"
)

// profiles is what the workers of a round have measured of its servers: of each server the newest sample of each worker. A server that
// nobody has measured lately keeps its old ones.
type profiles struct {
	samples []map[int]placement.Sample // by server and rank
	since   rankset.Set                // ranks that have reported since the placement looked
	verdict *wire.Verdict              // of the newest look; nil before the first
	tries   int                        // decisions that have moved nothing
	moving  rankset.Set                // ranks whose next report is of the time in which keys moved
}

// profiled takes a worker's report in. When all have reported, or one has again, the placement looks at the profiles. A report that cannot
// be true is left alone as a whole.
func (m *Machine) profiled(l *line, report *wire.Profile) {
	p := l.peer
	if p == nil || p.Role != wire.RoleWorker || p.round == nil {
		m.warn("ignored a report of how fast servers are: only a worker of a round that runs measures them")
		return
	}
	r := p.round
	if report.Round != r.epoch.Round || p.state != present {
		return
	}
	if err := r.checkProfile(report); err != nil {
		m.warn("ignored what %s reports of servers: %v", name(&p.Node), err)
		return
	}
	if r.profiles.moving.Has(p.Rank) { // it says little of the servers, and nothing of one that has just come
		r.profiles.moving.Remove(p.Rank)
		return
	}
	if r.profiles.since.Has(p.Rank) {
		m.look(r)
	}
	r.profiles.take(p.Rank, report.Servers)
	if r.profiles.since.Len() >= len(r.training()) {
		m.look(r)
	}
}

// checkProfile finds what no worker can have measured.
func (r *round) checkProfile(report *wire.Profile) error {
	seen := make([]bool, len(r.epoch.Servers))
	for _, s := range report.Servers {
		if s.Server < 0 || s.Server >= len(seen) {
			return fmt.Errorf("server %d, of %d", s.Server, len(seen))
		}
		if seen[s.Server] {
			return fmt.Errorf("server %d twice", s.Server)
		}
		seen[s.Server] = true
		if err := sampleOf(s).Check(); err != nil {
			return fmt.Errorf("server %d: %w", s.Server, err)
		}
	}
	return nil
}

func sampleOf(s wire.Sample) placement.Sample {
	return placement.Sample{Line: placement.Line{Alpha: s.Alpha, Beta: s.Beta}, Bytes: s.Bytes, Seconds: s.Seconds, Error: s.Error}
}

func (f *profiles) take(rank int, samples []wire.Sample) {
	f.since.Add(rank)
	for _, s := range samples {
		for s.Server >= len(f.samples) {
			f.samples = append(f.samples, map[int]placement.Sample{})
		}
		of := f.samples[s.Server]
		if _, has := of[rank]; has || len(of) < limits.MaxSamples {
			of[rank] = sampleOf(s)
		}
	}
}

// forget drops what a worker has measured that is lost or has left.
func (f *profiles) forget(rank int) {
	f.since.Remove(rank)
	for _, of := range f.samples {
		delete(of, rank)
	}
}

// list is the profiles of all servers, as a placement reads them.
func (f *profiles) list() placement.Profiles {
	all := make(placement.Profiles, len(f.samples))
	for server, of := range f.samples {
		for _, rank := range slices.Sorted(maps.Keys(of)) {
			all[server] = append(all[server], of[rank])
		}
	}
	return all
}

// look has the placement judge by the profiles, and says what has changed.
func (m *Machine) look(r *round) {
	f := &r.profiles
	f.since.Reset()
	policy, err := placement.Parse(r.epoch.Policy)
	if err != nil || !policy.Judges() {
		return
	}
	list := f.list()
	asks, err := r.epoch.Judge(list)
	if err != nil {
		m.warn("the placement %s cannot judge: %v", r.epoch.Policy, err)
		return
	}
	before := wire.Verdict{}
	if f.verdict != nil {
		before = *f.verdict
	}
	fastest, slowest := extremes(r.epoch, list)
	f.verdict = &wire.Verdict{Placement: r.epoch.Policy, Remap: asks.Remap, Grow: asks.Grow}
	if slowest >= 0 {
		f.verdict.Ratio = list[fastest].Speed() / list[slowest].Speed()
	}
	switch {
	case asks.Remap && !before.Remap:
		m.warn("the placement %s asks to move keys: server %d exchanges %s with a worker, server %d %s",
			r.epoch.Policy, slowest, speed(list[slowest].Speed()), fastest, speed(list[fastest].Speed()))
	case !asks.Remap && before.Remap:
		m.info("the placement %s asks no longer to move keys", r.epoch.Policy)
	}
	if asks.Grow && !before.Grow {
		m.warn("the placement %s asks for one more server: too few are fast", r.epoch.Policy)
	}
	if asks.Remap && r.epoch.Elastic && r.remaps() {
		m.remap(r, list)
	}
}

// remap has keys of an elastic job move as the profiles ask for (decision 99 says how). Members stay.
func (m *Machine) remap(r *round, list placement.Profiles) {
	before := r.epoch
	next, err := before.Next(membership.Change{Profiles: list, Remap: true, Tries: r.profiles.tries})
	if err != nil {
		m.warn("keys cannot move: %v", err)
		return
	}
	moves := membership.Moves(before, next)
	if len(moves) == 0 { // a key may stay on a slow server to explore it, but not the same one each time
		r.profiles.tries++
		return
	}
	if err := r.enter(next); err != nil {
		m.warn("keys cannot move: %v", err)
		return
	}
	m.info("epoch %d: %d of the keys in use move, by the speeds of the servers", next.Number, len(moves))
	m.broadcast(r, &wire.Control{Roster: r.roster})
}

// extremes are the fastest and the slowest server of those that run and have been measured; -1 for none.
func extremes(e *membership.Epoch, list placement.Profiles) (fastest, slowest int) {
	fastest, slowest = -1, -1
	for server, p := range list {
		if len(p) == 0 || e.Servers[server].State != membership.Live {
			continue
		}
		if fastest < 0 || p.Speed() > list[fastest].Speed() {
			fastest = server
		}
		if slowest < 0 || p.Speed() < list[slowest].Speed() {
			slowest = server
		}
	}
	return fastest, slowest
}

func speed(bytesPerSecond float64) string { return fmt.Sprintf("%.4g MB/s", bytesPerSecond/1e6) }

// shown is the profiles as people see them, nil where there are none.
func (f *profiles) shown(shares []wire.Share) []wire.ServerProfile {
	if len(f.samples) == 0 {
		return nil
	}
	all := make([]wire.ServerProfile, len(shares))
	for server, p := range f.list() {
		if len(p) > 0 {
			seconds, sem := p.Predict(float64(shares[server].Bytes))
			all[server] = wire.ServerProfile{Workers: len(p), Speed: p.Speed(), Seconds: seconds, Error: sem}
		}
	}
	return all
}
