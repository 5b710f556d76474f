package sim

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/invariant"
)

const ms = time.Millisecond

// scenario is small and exact: a key of 1 MB at 80 Mbit/s holds a link for 100 ms.
func scenario(t testing.TB, model, compute string, change func(*Scenario)) Scenario {
	t.Helper()
	m, err := condition.Parse(model)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ParseCompute(compute)
	if err != nil {
		t.Fatal(err)
	}
	s := Scenario{Workers: 1, Servers: 1, Keys: 1, Iterations: 1, Model: m, Compute: c, Bytes: 1_000_000, Bandwidth: 80e6, ServerBandwidth: 80e6, Seed: 1}
	if change != nil {
		change(&s)
	}
	return s
}

func mustRun(t testing.TB, s Scenario) Result {
	t.Helper()
	r, err := Run(s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Times worked out by hand, in ms.
func TestTimesAreThoseOfTheLinks(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Scenario)
		want   float64
	}{
		// 50 + a push of 100 and an answer of 100.
		"one worker": {func(*Scenario) {}, 250},
		"latency":    {func(s *Scenario) { s.Latency = 7 * ms }, 264},
		"twice":      {func(s *Scenario) { s.Iterations = 2 }, 500},
		// The server takes 4 pushes one after the other, then sends 4 answers so.
		"four share a server": {func(s *Scenario) { s.Workers = 4 }, 50 + 400 + 400},
		// Its link is four times as fast: the worker's is what a message is slow on.
		"a fast server": {func(s *Scenario) { s.Workers = 4; s.ServerBandwidth = 320e6 }, 50 + 100 + 100 + 75},
		// 0.2 MB to server 1, then 0.8 MB to server 0.
		"a layout": {func(s *Scenario) { s.Servers, s.Layout = 2, []Key{{1, 200_000}, {0, 800_000}} }, 50 + 100 + 80},
		// The same, with half the bandwidth at server 0.
		"a slow server": {func(s *Scenario) {
			s.Servers, s.Layout, s.ServerLinks = 2, []Key{{1, 200_000}, {0, 800_000}}, []Bandwidth{40e6, 80e6}
		}, 50 + 20 + 160 + 160},
		// Two servers with 0.5 MB each, pushed one after the other: the first answers while the second is pushed to.
		"overlap": {func(s *Scenario) { s.Servers = 2 }, 50 + 50 + 50 + 50},
		// A global barrier lets pulls begin when all is pushed: an acknowledgement, a report, the word
		// to go and the pull take 4 latencies more, and the two answers come over one link.
		"global": {func(s *Scenario) { s.Servers = 2; s.Barrier = Global; s.Latency = 1 * ms }, 50 + 100 + 1 + 4 + 100 + 1},
		// The processor's time for the last push, and for the first answer; of the others it is hidden behind the link.
		"a server that computes": {func(s *Scenario) { s.Workers = 4; s.ServerCost = 10 * ms }, 50 + 400 + 10 + 10 + 400},
		"a processor alone": {func(s *Scenario) {
			s.Bandwidth, s.ServerBandwidth, s.Latency, s.Workers, s.ServerCost = 0, 0, 1*ms, 9, 2*ms
		}, 50 + 1 + 9*2 + 9*2 + 1},
		"unlimited": {func(s *Scenario) { s.Bandwidth, s.ServerBandwidth = 0, 0; s.Latency = 1 * ms; s.Workers = 9 }, 52},
	} {
		s := scenario(t, "bsp", "constant:50ms", c.change)
		if got := 1000 * mustRun(t, s).Seconds; fmt.Sprintf("%.6f", got) != fmt.Sprintf("%.6f", c.want) {
			t.Errorf("%s: %.6f ms, want %.6f", name, got, c.want)
		}
	}
}

func free(workers, iterations int) func(*Scenario) {
	return func(s *Scenario) {
		s.Workers, s.Iterations = workers, iterations
		s.Bandwidth, s.ServerBandwidth = 0, 0
	}
}

func TestBSPGoesAtThePaceOfTheSlowest(t *testing.T) {
	r := mustRun(t, scenario(t, "bsp", "slow:100ms,3", free(8, 10)))
	if r.Seconds != 3 || r.MaxLead != 0 || r.Staleness != 0 || r.Delayed != 70 {
		t.Errorf("%+v", r)
	}
	if got := fmt.Sprintf("%.4f", r.Wait); got != fmt.Sprintf("%.4f", 7.*2/3/8) {
		t.Errorf("wait %s", got)
	}
}

func TestASPNeverWaits(t *testing.T) {
	r := mustRun(t, scenario(t, "asp", "slow:100ms,3", free(8, 10)))
	if r.Delayed != 0 || r.Wait != 0 || r.Seconds != 3 || r.MaxLead != 6 {
		t.Errorf("%+v", r)
	}
}

// FluentPS Table III, row SSP: nobody leads by more than s, and with a slow worker somebody does.
func TestSSPLeadsByItsStalenessAtMost(t *testing.T) {
	for _, parking := range []condition.Parking{condition.Lazy, condition.SoftBarrier} {
		for s := range uint64(6) {
			r := mustRun(t, scenario(t, fmt.Sprintf("ssp:%d", s), "slow:100ms,3", func(sc *Scenario) { free(4, 40)(sc); sc.Parking = parking }))
			if r.MaxLead != s {
				t.Errorf("s = %d, %v: the greatest lead is %d", s, parking, r.MaxLead)
			}
		}
	}
}

// FluentPS section III-C: behind a steady straggler the soft barrier delays a fast worker's pull in every
// iteration, the lazy order in one of s + 1.
func TestLazyParkingDelaysFewerPulls(t *testing.T) {
	delayed := func(p condition.Parking) uint64 {
		return mustRun(t, scenario(t, "ssp:3", "slow:100ms,20", func(s *Scenario) { free(2, 100)(s); s.Parking = p })).Delayed
	}
	// The fast worker runs 4 free, so at the soft barrier 97 of its 100 pulls wait; 25 under lazy parking.
	if soft, lazy := delayed(condition.SoftBarrier), delayed(condition.Lazy); soft != 97 || lazy != 25 {
		t.Errorf("soft barrier %d, lazy %d", soft, lazy)
	}
}

// ElasticBSP's paper, section 3. Intervals are 3, 5 and 7 ms. The slowest's second push at 14 makes the plan:
// of the ends 15 18 21 24, 15 20 25 30 and 21 28 35 42, those at 21, 20 and 21 lie closest. So a superstep
// has 7 + 4 + 3 iterations in 21 ms, of which one worker waits 1 ms.
func TestElasticMeetsWherePredicted(t *testing.T) {
	s := scenario(t, "elastic:4", "constant:1ms", func(s *Scenario) { free(3, 28)(s); s.Until = Total })
	s.Compute.draw = func(d draw) time.Duration { return []time.Duration{3 * ms, 5 * ms, 7 * ms}[d.rank] }
	r := mustRun(t, s)
	if r.Seconds != 0.126 || r.Supersteps != 6 || fmt.Sprintf("%.4f", r.Wait) != fmt.Sprintf("%.4f", 6./3/126) {
		t.Errorf("%+v", r)
	}
}

// The adaptive paper, section III: with thresholds that follow, workers beside a slow one work instead of waiting.
func TestAdaptiveWaitsLessThanBSP(t *testing.T) {
	total := func(s *Scenario) { free(4, 200)(s); s.Until = Total }
	bsp := mustRun(t, scenario(t, "bsp", "slow:100ms,3,0.05", total))
	adaptive := mustRun(t, scenario(t, "adaptive:1,1", "slow:100ms,3,0.05", total))
	if adaptive.Seconds > 0.7*bsp.Seconds || adaptive.Wait > bsp.Wait/2 {
		t.Errorf("adaptive %+v\nbsp %+v", adaptive, bsp)
	}
}

// The adaptive paper, section III: s = 1 is BSP. The worker whose iteration makes the barrier due stops with that iteration,
// so that there are as many supersteps as iterations and nobody reads a value that misses a push.
func TestAdaptiveWithThresholdsOfOneIsBSP(t *testing.T) {
	for _, latency := range []time.Duration{0, 7 * ms} {
		s := scenario(t, "adaptive:1,1", "uniform:100ms,140ms", func(s *Scenario) { free(5, 40)(s); s.Latency = latency })
		r := mustRun(t, s)
		if r.Supersteps != 40 || r.Done != 200 || r.MaxStale != 0 || r.MaxLead != 0 {
			t.Errorf("latency %v: %+v", latency, r)
		}
	}
}

func TestDSPSMovesStaleness(t *testing.T) {
	r := mustRun(t, scenario(t, "dsps:1,9", "slow:100ms,3", free(4, 60)))
	if r.MaxLead <= 1 || r.MaxLead > 9 {
		t.Errorf("the greatest lead is %d", r.MaxLead)
	}
}

func TestDropStragglersDropsLatePushes(t *testing.T) {
	r := mustRun(t, scenario(t, "drop-stragglers:3", "slow:100ms,3", free(4, 30)))
	if r.Dropped != 30 {
		t.Errorf("%d pushes dropped, want all 30 of the slow worker", r.Dropped)
	}
}

func TestARunRepeatsForASeed(t *testing.T) {
	run := func(seed uint64) Result {
		return mustRun(t, scenario(t, "pssp:2,0.5", "lognormal:100ms,0.5", func(s *Scenario) {
			s.Workers, s.Servers, s.Keys, s.Iterations, s.Seed = 8, 3, 2, 20, seed
		}))
	}
	a, b, other := run(7), run(7), run(8)
	if !reflect.DeepEqual(a, b) {
		t.Errorf("the same seed gives\n%+v and\n%+v", a, b)
	}
	if a.Seconds == other.Seconds {
		t.Error("another seed gives the same run")
	}
}

var (
	jobs = flag.Uint64("jobs", 400, "random jobs that TestRandomJobsKeepTheInvariants runs")
	job  = flag.Uint64("job", 0, "seed of the one job that it runs, as a failure printed it")
)

// Random jobs of every kind under the ledger of gate.go. More: go test ./sim -run RandomJobs -jobs 100000.
func TestRandomJobsKeepTheInvariants(t *testing.T) {
	if *job != 0 {
		randomJob(t, *job)
		return
	}
	first := uint64(time.Now().UnixNano())
	for k := range *jobs {
		randomJob(t, first+k)
	}
}

func FuzzJobs(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) { randomJob(t, seed) })
}

func randomJob(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 9))
	models := []string{"bsp", "asp", "ssp:2", "ssp:0", "dsps:0,4", "drop-stragglers:1", "pssp:1,0.5", "pssp:2,1", "dynamic-pssp:1,0.7",
		"adaptive:1,1", "adaptive:3,2", "elastic:1", "elastic:9", "expression:lead < 2 || count[V] * 2 > N", "expression:fastest - slowest < 3;count[V] * 2 > N"}
	computes := []string{"constant:10ms", "uniform:5ms,20ms", "lognormal:10ms,1", "slow:10ms,7,0.1,5", "transient:10ms,0.1,9", "spread:10ms,30ms,0.1", "constant:0s"}
	s := scenario(t, models[rng.IntN(len(models))], computes[rng.IntN(len(computes))], func(s *Scenario) {
		s.Workers, s.Servers, s.Keys, s.Iterations = 1+rng.IntN(9), 1+rng.IntN(4), 1+rng.IntN(3), 1+rng.IntN(25)
		s.Until, s.Barrier, s.Parking = Until(rng.IntN(2)), Barrier(rng.IntN(2)), condition.Parking(rng.IntN(2))
		s.Bytes, s.Latency, s.Seed = rng.Int64N(200_000), time.Duration(rng.IntN(5))*ms, seed
		s.Bandwidth, s.ServerBandwidth = Bandwidth(rng.IntN(3))*8e6, Bandwidth(rng.IntN(3))*8e6
	})
	r, err := Run(s)
	if err != nil {
		t.Fatalf("%v\nagain: go test ./sim -run RandomJobs -job %d", err, seed)
	}
	if want := uint64(s.Workers * s.Iterations); r.Done < want || s.Until == Total && r.Done != want {
		t.Fatalf("job %d: %d iterations done, want %d", seed, r.Done, want)
	}
	if parts := r.Compute + r.Wait + r.Exchange + r.Idle; r.Seconds > 0 && (parts < 0.999 || parts > 1.001) {
		t.Fatalf("job %d: the parts of the time make %v: %+v", seed, parts, r)
	}
}

// The machines' own checks look at every rank in every step, so that where they are compiled in a smaller job has to do.
func TestTenThousandWorkersAgainstHundredsOfServers(t *testing.T) {
	workers, servers := MaxWorkers, 200
	if invariant.On {
		workers = 100
	}
	r := mustRun(t, scenario(t, "ssp:1", "lognormal:1s,0.2", func(s *Scenario) {
		s.Workers, s.Servers, s.Iterations, s.Bandwidth, s.ServerBandwidth = workers, servers, 2, 10e9, 100e9
		s.Bytes = 100e6
	}))
	if r.Done != uint64(2*workers) || r.Pulls != uint64(2*workers*servers) {
		t.Errorf("%+v", r)
	}
}

func TestScenariosThatMakeNoSenseAreRefused(t *testing.T) {
	for want, change := range map[string]func(*Scenario){
		"workers is 0, allowed is 1 to 10000":         func(s *Scenario) { s.Workers = 0 },
		"workers is 10001, allowed":                   func(s *Scenario) { s.Workers = 10_001 },
		"servers is -1, allowed":                      func(s *Scenario) { s.Servers = -1 },
		"keys is 5001, allowed is 1 to 5000":          func(s *Scenario) { s.Servers, s.Keys = 2, 5001 },
		"iterations is 0, allowed":                    func(s *Scenario) { s.Iterations = 0 },
		"workers times keys is 100000000, allowed":    func(s *Scenario) { s.Workers, s.Keys = 10_000, 10_000 },
		"bytes is -1, allowed":                        func(s *Scenario) { s.Bytes = -1 },
		"latency is -1ns and server cost 0s, allowed": func(s *Scenario) { s.Latency = -1 },
		"no compute times are given, allowed are":     func(s *Scenario) { s.Compute = Compute{} },
		"waits for 2 workers of 1: allowed is from 1": func(s *Scenario) { s.Model = condition.DropStragglers(2) },
		"virtual workers have no gradients, so ALPHA": func(s *Scenario) { s.Model = condition.DynamicPSSP(1, condition.Significance{}, 0) },
		"needs a pull and a push condition":           func(s *Scenario) { s.Model = condition.Model{} },
	} {
		s := scenario(t, "bsp", "constant:1ms", change)
		if _, err := Run(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}
