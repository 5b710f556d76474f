package sim

import (
	"slices"
	"testing"
	"time"

	"github.com/paceline/paceline/core/placement"
)

// stragglers is PSLD's cluster (section 6): 8 workers and 8 servers at 10 Gbit/s, of which some have 1 Gbit/s, and VGG-16 in blocks of 4 MiB.
func stragglers(t testing.TB, setting string, slow int) *Job {
	policy, err := placement.Parse(setting)
	if err != nil {
		t.Fatal(err)
	}
	j := Job{Policy: policy, Newcomer: Server{Link: 10e9}}
	j.Scenario = scenario(t, "bsp", "constant:300ms", func(s *Scenario) {
		s.Workers, s.Bandwidth = 8, 10e9
		for block := range 132 {
			s.Layout = append(s.Layout, Key{Server: block % 8, Bytes: 4 << 20})
		}
	})
	j.Servers = links(8, slow)
	return &j
}

func links(servers, slow int) []Server {
	s := slices.Repeat([]Server{{Link: 10e9}}, servers)
	for i := range slow {
		s[i].Link = 1e9
	}
	return s
}

func (j *Job) mustIterate(t testing.TB, iterations int) (last time.Duration) {
	for range iterations {
		var err error
		if last, err = j.Iterate(); err != nil {
			t.Fatal(err)
		}
	}
	return last
}

// Figures 11 and 14 of PSLD: with stragglers an even placement, which MXNet's is for VGG-16, is slowest, and PSLD without exploration
// is not slower than shares in proportion to speed.
func TestPSLDTakesKeysFromStragglers(t *testing.T) {
	for _, slow := range []int{1, 2, 4} {
		took := func(setting string, iterations int) time.Duration {
			return stragglers(t, setting, slow).mustIterate(t, iterations)
		}
		even, proportional, exploit, explore := took("psld", 1), took("proportional", 2), took("psld:0", 2), took("psld", 2)
		if even < 2*explore || explore < exploit || exploit > proportional+proportional/20 {
			t.Errorf("%d slow: even %v, with exploration %v, without %v, proportional %v", slow, even, explore, exploit, proportional)
		}
	}
}

// Figure 18: servers are slow for a while. Afterwards PSLD gives them keys again, and then moves none any more; without exploration
// nobody measures them, and shares in proportion to speed stay as they are.
func TestPSLDSettlesAfterStragglersRecover(t *testing.T) {
	for _, slow := range []int{1, 2, 4} {
		for seed := range uint64(10) {
			for setting, recovers := range map[string]bool{"psld": true, "psld:0": false, "proportional": false} {
				j := stragglers(t, setting, slow)
				j.Scenario.Seed = seed
				free := j.copied(0).mustIterate(t, 1)
				j.mustIterate(t, 6)
				j.Servers = links(8, 0)
				j.mustIterate(t, 8)
				settled := j.Remaps
				last := j.mustIterate(t, 12)
				for server, load := range j.Loads()[:slow] {
					if got := load > 132/8*4<<20/2; got != recovers {
						t.Errorf("%s, %d slow, seed %d: server %d has %d bytes after it has recovered", setting, slow, seed, server, load)
					}
				}
				if setting == "psld" && (j.Remaps != settled || last > free+free/10) {
					t.Errorf("%d slow, seed %d: an iteration takes %v after recovery, %v without stragglers; late remaps: %d", slow, seed, last, free, j.Remaps-settled)
				}
			}
		}
	}
}

// While a straggler stays, keys settle: after the first looks none moves.
func TestKeysSettleWhileStragglersStay(t *testing.T) {
	for _, slow := range []int{1, 2, 4} {
		for seed := range uint64(10) {
			for _, setting := range []string{"psld", "psld:0", "proportional"} {
				j := stragglers(t, setting, slow)
				j.Scenario.Seed = seed
				j.mustIterate(t, 8)
				settled, layout := j.Remaps, slices.Clone(j.Scenario.Layout)
				j.mustIterate(t, 30)
				if settled == 0 || j.Remaps != settled {
					moved := 0
					for i, k := range j.Scenario.Layout {
						if k.Server != layout[i].Server {
							moved++
						}
					}
					t.Errorf("%s, %d slow, seed %d: %d remaps in 8 iterations, %d in 30 more, which have left %d keys elsewhere", setting, slow, seed, settled, j.Remaps-settled, moved)
				}
			}
		}
	}
}

// copied is the job at its beginning with other servers.
func (j *Job) copied(slow int) *Job {
	return &Job{Scenario: j.Scenario, Policy: j.Policy, Servers: links(len(j.Servers), slow)}
}
