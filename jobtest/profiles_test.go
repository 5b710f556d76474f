package jobtest_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

const (
	measuredRanks   = 3
	measuredServers = 3
	measuredBytes   = 1536 << 10 // of a tensor in 24 partitions, 8 on each server
	measuredLink    = 10 << 20   // bytes per second from a node to another
	measuredShare   = measuredBytes / measuredServers
)

// measured trains a job of dedicated servers in virtual time, each rank with a pause before its push, and gives what its scheduler knows in the end.
func measured(t *testing.T, script string, pause func(rank int) time.Duration, options ...jobtest.Option) (s wire.StatusReply) {
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{Latency: 100 * time.Microsecond, Bandwidth: measuredLink})
		t.Cleanup(network.Close)
		options = append(options, jobtest.Dedicated(measuredServers), jobtest.SmallPartitions, eachOn(network))
		j := jobtest.Start(t, measuredRanks, options...)
		if err := network.Script(script); err != nil {
			t.Fatal(err)
		}
		j.Each(func(rank int) error {
			for range 40 {
				time.Sleep(pause(rank))
				if err := j.Sums(rank, "gradient", measuredBytes); err != nil {
					return err
				}
			}
			return nil
		})
		time.Sleep(j.Settings.PlacementPeriod)
		s = status(t, j)
	})
	return s
}

func slowLinks(server int, rate int) string {
	var script strings.Builder
	for rank := range measuredRanks {
		fmt.Fprintf(&script, "at 0s %s<->%s rate %d\n", nodeName(rank), serverName(server), rate)
	}
	return script.String()
}

func together(int) time.Duration { return 300 * time.Millisecond }

// TestASlowLinkToAServerIsSeenInItsProfile and in no other's (PSLD section 4.1).
func TestASlowLinkToAServerIsSeenInItsProfile(t *testing.T) {
	s := measured(t, slowLinks(1, measuredLink/10), together, jobtest.With(func(s *settings.Settings) { s.Placement = "psld:0" }))
	for server, rate := range []float64{measuredLink, measuredLink / 10, measuredLink} {
		wantSpeed(t, &s, server, rate)
	}
	if v := s.Verdict; v == nil || !v.Remap || v.Grow || v.Ratio < 8 || v.Ratio > 12 {
		t.Errorf("the verdict is %+v of %+v", v, s.Profiles)
	}
}

// TestKeysLeaveASlowServerOfAnElasticJob while it runs. Its sums are checked in every iteration.
func TestKeysLeaveASlowServerOfAnElasticJob(t *testing.T) {
	s := measured(t, slowLinks(1, measuredLink/10), together, jobtest.Elastic, jobtest.With(func(s *settings.Settings) { s.Placement = "psld:0" }))
	if slow, fast := s.Shares[1].Bytes, s.Shares[0].Bytes; 4*slow > fast || s.Roster.Epoch == 0 {
		t.Errorf("epoch %d: the slow server has %d bytes, a fast one %d", s.Roster.Epoch, slow, fast)
	}
	if slow, fast := s.Nodes[measuredRanks+1].Progress, s.Nodes[measuredRanks].Progress; slow == nil || fast == nil || 2*slow.Served > fast.Served {
		t.Errorf("the slow server has taken in %+v, a fast one %+v", slow, fast)
	}
}

// TestKeysSettleWhileASlowServerStays: of some thirty looks at the profiles few begin an epoch.
func TestKeysSettleWhileASlowServerStays(t *testing.T) {
	for _, placement := range []string{"psld", "psld:0", "proportional"} {
		s := measured(t, slowLinks(1, measuredLink/10), together, jobtest.Elastic, jobtest.With(func(s *settings.Settings) { s.Placement, s.PlacementPeriod = placement, 500*time.Millisecond }))
		t.Logf("%s: epoch %d", placement, s.Roster.Epoch)
		if s.Roster.Epoch < 1 || s.Roster.Epoch > 3 {
			t.Errorf("%s: keys have moved %d times", placement, s.Roster.Epoch)
		}
	}
}

// TestProcessesAreLostWhileKeysLeaveASlowServer: workers and servers, the slow one among them, before its keys move, while they do and afterwards.
func TestProcessesAreLostWhileKeysLeaveASlowServer(t *testing.T) {
	underLosses(t, "TestProcessesAreLostWhileKeysLeaveASlowServer", func(t *testing.T, seed uint64) {
		random := rand.New(rand.NewPCG(seed, 19))
		m := jobtest.NewMeans(random, measuredRanks, 20000+random.IntN(200000), 40, measuredServers)
		m.Heirs = true
		gone := random.Perm(measuredServers)[:random.IntN(measuredServers)]
		network := transporttest.NewNetwork(transporttest.Options{PeerTimeout: 3 * time.Second, Latency: 100 * time.Microsecond, Bandwidth: measuredLink})
		t.Cleanup(network.Close)
		j := jobtest.Start(t, measuredRanks, jobtest.Dedicated(measuredServers), jobtest.Elastic, jobtest.SmallPartitions, eachOn(network),
			jobtest.With(func(s *settings.Settings) { s.Placement, s.PlacementPeriod = "psld:0", 300*time.Millisecond }))
		revived(t, network, measuredServers)
		script := slowLinks(random.IntN(measuredServers), measuredLink/20)
		for _, rank := range m.Lost {
			script += rankCutOff(rank, measuredServers, time.Duration(random.IntN(6000))*time.Millisecond, "reset")
		}
		for _, i := range gone {
			script += cutOff(measuredRanks, i, time.Duration(random.IntN(6000))*time.Millisecond, "reset")
		}
		if err := network.Script(script); err != nil {
			t.Fatal(err)
		}
		for rank, err := range j.Outcomes(func(rank int) error { return m.Train(j, rank) }) {
			if lost := slices.Contains(m.Lost, rank); lost {
				m.Results[rank] = nil
			} else if err != nil {
				t.Errorf("rank %d, without ranks %v and servers %v: %v", rank, m.Lost, gone, err)
			}
		}
		if err := m.Check(); err != nil {
			t.Errorf("without ranks %v and servers %v: %v", m.Lost, gone, err)
		}
	})
}

// TestASlowWorkerIsSeenInNoProfile: the others' exchanges wait for it, by 20 times what the links take.
func TestASlowWorkerIsSeenInNoProfile(t *testing.T) {
	s := measured(t, "", func(rank int) time.Duration {
		if rank == 1 {
			return 2 * time.Second
		}
		return together(rank)
	}, jobtest.With(func(s *settings.Settings) { s.Placement = "psld:0" }))
	for server := range measuredServers {
		wantSpeed(t, &s, server, measuredLink)
	}
	if v := s.Verdict; v == nil || v.Remap || v.Grow || v.Ratio > 1.3 {
		t.Errorf("the verdict is %+v of %+v", v, s.Profiles)
	}
}

// TestServersAreMeasuredUnderAnyPlacement, but only one that judges has a verdict.
func TestServersAreMeasuredUnderAnyPlacement(t *testing.T) {
	s := measured(t, slowLinks(2, measuredLink/4), together)
	for server, rate := range []float64{measuredLink, measuredLink, measuredLink / 4} {
		wantSpeed(t, &s, server, rate)
	}
	if s.Verdict != nil {
		t.Errorf("a verdict of a placement that does not judge: %+v", s.Verdict)
	}
	s = measured(t, "", together, jobtest.With(func(s *settings.Settings) { s.PlacementPeriod = 0 }))
	if s.Profiles != nil {
		t.Errorf("profiles where none are asked for: %+v", s.Profiles)
	}
}

// wantSpeed checks that all ranks have measured what a link of that rate allows: push and answer take the link each its way, at best at the
// same time.
func wantSpeed(t *testing.T, s *wire.StatusReply, server int, rate float64) {
	t.Helper()
	if len(s.Profiles) != measuredServers {
		t.Fatalf("%d profiles: %+v", len(s.Profiles), s.Profiles)
	}
	p := s.Profiles[server]
	predicted := float64(s.Shares[server].Bytes) / p.Speed
	if p.Workers != measuredRanks || p.Speed < 0.4*rate || p.Speed > 1.05*rate || math.Abs(p.Seconds-predicted) > 0.1*predicted || p.Error > 0.1*predicted {
		t.Errorf("server %d, over links of %.3g MB/s: %+v", server, rate/1e6, p)
	}
}
