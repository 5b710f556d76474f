package sim

import (
	"testing"
	"time"

	"github.com/paceline/paceline/core/placement"
)

// cluster is PSLD's (section 6): 8 workers and 8 servers at 10 Gbit/s, of which some have 1 Gbit/s, and VGG-16 in blocks of 4 MiB.
func cluster(t *testing.T, slow int) Scenario {
	return scenario(t, "bsp", "constant:300ms", func(s *Scenario) {
		s.Workers, s.Servers, s.Iterations, s.Bandwidth, s.ServerBandwidth = 8, 8, 1, 10e9, 10e9
		for server := range s.Servers {
			link := Bandwidth(10e9)
			if server < slow {
				link = 1e9
			}
			s.ServerLinks = append(s.ServerLinks, link)
		}
		for block := range 132 {
			s.Layout = append(s.Layout, Key{Server: block % s.Servers, Bytes: 4 << 20})
		}
	})
}

// iterate runs an iteration, and measures the servers as workers do.
func iterate(t *testing.T, s Scenario) (time.Duration, placement.Profiles) {
	fits := make([]placement.Fit, s.Workers*s.Servers)
	s.Observe = func(rank, key int, took time.Duration) {
		k := s.Layout[key]
		fits[rank*s.Servers+k.Server].Add(float64(k.Bytes), took.Seconds())
	}
	r := mustRun(t, s)
	profiles := make(placement.Profiles, s.Servers)
	for i := range fits {
		if sample, ok := fits[i].Sample(); ok {
			profiles[i%s.Servers] = append(profiles[i%s.Servers], sample)
		}
	}
	return time.Duration(r.Seconds * float64(time.Second)), profiles
}

// remap places the blocks anew, by what was measured.
func remap(t *testing.T, s Scenario, setting string, profiles placement.Profiles, seed uint64) Scenario {
	policy, err := placement.Parse(setting)
	if err != nil {
		t.Fatal(err)
	}
	now := placement.Situation{Weights: placement.Even(s.Servers), Profiles: profiles, Initial: s.Servers, Seed: seed}
	for _, k := range s.Layout {
		now.Blocks = append(now.Blocks, placement.Block{Bytes: uint64(k.Bytes), Server: k.Server})
	}
	if !policy.Judge(now).Remap {
		return s
	}
	servers, err := policy.Remap(now)
	if err != nil {
		t.Fatal(err)
	}
	layout := make([]Key, len(s.Layout))
	for i, k := range s.Layout {
		layout[i] = Key{Server: servers[i], Bytes: k.Bytes}
	}
	s.Layout = layout
	return s
}

// Figures 11 and 14 of PSLD: with stragglers an even placement, which MXNet's is for VGG-16, is slowest, and PSLD without exploration
// is not slower than shares in proportion to speed.
func TestPSLDTakesKeysFromStragglers(t *testing.T) {
	free, _ := iterate(t, cluster(t, 0))
	for _, slow := range []int{1, 2, 4} {
		s := cluster(t, slow)
		even, profiles := iterate(t, s)
		proportional, _ := iterate(t, remap(t, s, "proportional", profiles, 1))
		exploit, _ := iterate(t, remap(t, s, "psld:0", profiles, 1))
		explore, _ := iterate(t, remap(t, s, "psld", profiles, 1))
		if even < 3*explore || explore < exploit || exploit > proportional+proportional/20 {
			t.Errorf("%d slow: even %v, with exploration %v, without %v, proportional %v", slow, even, explore, exploit, proportional)
		}
		t.Logf("%d slow: even %v, proportional %v, PSLD %v, with exploration %v; none slow %v", slow, even, proportional, exploit, explore, free)
	}
}

// Figure 18: two servers are slow for a while. After they have recovered, only exploration measures them: without it they stay empty.
func TestOnlyExplorationMeasuresServersThatHaveRecovered(t *testing.T) {
	for setting, want := range map[string]bool{"psld": true, "psld:0": false} {
		s, measured := cluster(t, 2), false
		for round := range uint64(8) {
			if round == 4 {
				s.ServerLinks = cluster(t, 0).ServerLinks
			}
			_, profiles := iterate(t, s)
			measured = measured || round >= 4 && len(profiles[0]) > 0
			s = remap(t, s, setting, profiles, round)
		}
		if measured != want {
			t.Errorf("%s: a server that has recovered is measured: %t", setting, measured)
		}
	}
}
