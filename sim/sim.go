// Package sim runs whole jobs in virtual time: up to 10,000 workers against hundreds of servers, on
// one core, from a seed. It drives the code of the wire, condition.Machine for each key and both
// halves of core/superstep; only the computing and the links are models. A ledger checks every run (gate.go);
// a violation is an error that names the seed.
//
// The model: a worker computes for a time drawn from its Compute, then pushes its keys, in the
// same order on every worker, and starts over when all are answered; a pull travels with its push. A
// message occupies a link for its bytes over the link's bandwidth, first come first served, and is complete
// when it has passed the links at both ends and the latency between them. Sending and receiving are
// independent, the network between the links has unlimited capacity, and a message without payload takes
// only the latency. Each server has one processor, which spends a given time on every message with a payload, and on each of its
// bytes, one after the other.
package sim

import (
	"fmt"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/units"
)

// Bounds of a scenario: they keep a run within a few GB of memory.
const (
	MaxWorkers    = 10_000
	MaxServers    = 1_000
	MaxKeys       = 10_000 // of all servers together
	MaxIterations = 1_000_000
	MaxExchanges  = 50_000_000 // workers × keys
	MaxBytes      = 1 << 40
	MaxDelay      = time.Hour // latency, or a server's cost
)

// Barrier selects the decider of when a pull is answered.
type Barrier uint8

// Barriers.
const (
	// Overlap: each server answers for its own keys by itself (FluentPS section III-D).
	Overlap Barrier = iota
	// Global: a scheduler decides for all keys at once, as in PS-Lite. A worker reports to it when all
	// its pushes are acknowledged, and pulls when the scheduler allows it.
	Global
)

func (b Barrier) String() string { return units.Text([]string{"overlap", "global"}, "barrier", b) }

// Until selects the end of a run.
type Until uint8

// Ends of a run, with T = Scenario.Iterations.
const (
	// All: every worker has done T iterations. Under models without supersteps it does no more;
	// with supersteps workers continue until the last has its T.
	All Until = iota
	// Total: the workers have done N·T together, as in epochs over data that they share.
	Total
)

func (u Until) String() string { return units.Text([]string{"all", "total"}, "until", u) }

// Scenario is a job in virtual time.
type Scenario struct {
	Workers    int
	Servers    int
	Keys       int // of each server; without a layout
	Layout     []Key
	Iterations int
	Until      Until

	Model   condition.Model
	Parking condition.Parking
	Barrier Barrier

	Compute         Compute
	Bytes           int64         // of all keys together, each way in every iteration; without a layout
	Bandwidth       Bandwidth     // of a worker's link, each way
	ServerBandwidth Bandwidth     // of a server's link, each way
	ServerLinks     []Bandwidth   // of each server's link, where they differ
	Latency         time.Duration // one way
	ServerCost      time.Duration // of a server's one processor for a key, when it is whole and again when it is answered

	// ServerProcessors is how fast each server's processor handles the bytes of a key, besides ServerCost; nil is without limit.
	ServerProcessors []Bandwidth

	Seed uint64 // of the computing times

	// Observe, where it is set, gets each exchange of a key, as its worker can time it.
	Observe func(rank, key int, e placement.Exchange)
}

// Key is one of a layout: workers push keys in its order. Without a layout the bytes are shared by all keys equally, and the
// keys by the servers in turn.
type Key struct {
	Server int
	Bytes  int64
}

// Check reports the faults of the scenario, with the allowed values.
func (s Scenario) Check() error {
	keys, most := s.Keys, max(1, MaxKeys/max(1, s.Servers))
	if s.Layout != nil {
		keys, most = len(s.Layout), MaxKeys
	}
	for _, f := range []struct {
		name               string
		value, least, most int
	}{
		{"workers", s.Workers, 1, MaxWorkers},
		{"servers", s.Servers, 1, MaxServers},
		{"keys", keys, 1, most},
		{"iterations", s.Iterations, 1, MaxIterations},
		{"workers times keys", s.Workers * s.keys(), 1, MaxExchanges},
	} {
		if f.value < f.least || f.value > f.most {
			return fmt.Errorf("%s is %d, allowed is %d to %d", f.name, f.value, f.least, f.most)
		}
	}
	if err := s.checkLayout(); err != nil {
		return err
	}
	switch {
	case s.Bytes < 0 || s.Bytes > MaxBytes:
		return fmt.Errorf("bytes is %d, allowed is 0 to %d", s.Bytes, int64(MaxBytes))
	case s.Latency < 0 || s.Latency > MaxDelay || s.ServerCost < 0 || s.ServerCost > MaxDelay:
		return fmt.Errorf("latency is %v and server cost %v, allowed is 0 to %v", s.Latency, s.ServerCost, MaxDelay)
	case s.Compute.draw == nil:
		return fmt.Errorf("no compute times are given, allowed are %s", computeUsage())
	}
	if err := s.Model.Check(condition.Accumulate); err != nil {
		return err
	}
	if s.Model.Traits().Significance {
		return fmt.Errorf("synchronisation model %s: virtual workers have no gradients, so ALPHA must be a number and an expression cannot ask for the significance", s.Model.Name)
	}
	return s.Model.CheckWorkers(s.Workers)
}

func (s Scenario) checkLayout() error {
	if s.ServerLinks != nil && len(s.ServerLinks) != s.Servers || s.ServerProcessors != nil && len(s.ServerProcessors) != s.Servers {
		return fmt.Errorf("%d links and %d processors are given for %d servers, allowed are as many as servers, or none", len(s.ServerLinks), len(s.ServerProcessors), s.Servers)
	}
	for i, k := range s.Layout {
		if k.Server < 0 || k.Server >= s.Servers || k.Bytes < 0 || k.Bytes > MaxBytes {
			return fmt.Errorf("key %d of the layout has %d bytes on server %d, allowed are 0 to %d bytes on servers 0 to %d", i, k.Bytes, k.Server, int64(MaxBytes), s.Servers-1)
		}
	}
	return nil
}

// keys is the number of keys of all servers.
func (s Scenario) keys() int {
	if s.Layout != nil {
		return len(s.Layout)
	}
	return s.Servers * s.Keys
}

// server is the server of a key.
func (s Scenario) server(key int) int {
	if s.Layout != nil {
		return s.Layout[key].Server
	}
	return key % s.Servers
}

// link is the bandwidth of a server's link.
func (s Scenario) link(server int) Bandwidth {
	if s.ServerLinks != nil {
		return s.ServerLinks[server]
	}
	return s.ServerBandwidth
}

// cost is how long a server's processor has work with a key, each way.
func (s Scenario) cost(server int, bytes int64) time.Duration {
	if s.ServerProcessors == nil {
		return s.ServerCost
	}
	return s.ServerCost + s.ServerProcessors[server].hold(bytes)
}

// bytes is the size of a key: without a layout an equal share, to the byte.
func (s Scenario) bytes(key int) int64 {
	if s.Layout != nil {
		return s.Layout[key].Bytes
	}
	from, to := placement.Rows(s.Bytes, s.keys(), key)
	return to - from
}
