package jobtest_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/worker"
)

var (
	elastics    = flag.Int("elastics", seeds(12), "how many seeds each test of random losses runs")
	elasticSeed = flag.Uint64("elastic", 0, "the first of them: a seed that failed")
)

// seeds is how many seeds a test of whole jobs runs, of so many: a third under the race detector, which takes ten times as long. make test runs them without it too.
func seeds(n int) int {
	if race {
		return n / 3
	}
	return n
}

// TestElasticJobsUnderRandomLosses plays jobs in which ranks die, break off or fall silent at any time: between steps, in the middle of
// a push, several at once.
func TestElasticJobsUnderRandomLosses(t *testing.T) {
	underLosses(t, "TestElasticJobsUnderRandomLosses", playLosses)
}

// underLosses plays a test's seeds.
func underLosses(t *testing.T, name string, play func(t *testing.T, seed uint64)) {
	for seed := *elasticSeed; seed < *elasticSeed+uint64(*elastics); seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { play(t, seed) })
			if t.Failed() {
				t.Logf("again: go test -tags invariants ./jobtest -run %s -elastic %d -elastics 1", name, seed)
			}
		})
	}
}

func playLosses(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 11))
	ranks, dedicated, servers, where, embedded := places(random)
	m := jobtest.NewMeans(random, ranks, 1+random.IntN(50000), 60, servers)
	gone := random.Perm(dedicated)[:random.IntN(max(dedicated, 1))]
	m.Heirs, m.Codec = embedded || len(gone) > 0, []string{"", "topk:0.1", "int4:block=64,feedback=on"}[random.IntN(3)]
	j, network := lendingOn(t, m.Ranks, seed%2 == 1, where)
	j.Settings.Connections = 1 + random.IntN(2)
	revived(t, network, dedicated)
	j.Start()
	if err := network.Script(losses(random, m, dedicated, embedded) + serverLosses(random, m, gone)); err != nil {
		t.Fatal(err)
	}
	errs := j.Outcomes(func(rank int) error { return m.Train(j, rank) })
	for rank, err := range errs {
		switch lost := slices.Contains(m.Lost, rank); {
		case lost: // or it has ended before, or came back in time
			m.Results[rank] = nil
			if err != nil && !errors.Is(err, worker.ErrPeerLost) && !errors.Is(err, worker.ErrStall) && // cut off from the scheduler it cannot declare
				!strings.HasSuffix(err.Error(), "has shut down") { // it came back when the others had ended
				t.Errorf("rank %d, which is lost, ends with %v", rank, err)
			}
		case err != nil:
			t.Errorf("rank %d of %d, without ranks %v and servers %v of %d, embedded ones: %v: %v", rank, m.Ranks, m.Lost, gone, dedicated, embedded, err)
		}
	}
	if t.Failed() {
		return
	}
	if err := m.Check(); err != nil {
		t.Errorf("%d ranks, without ranks %v and servers %v of %d, embedded ones: %v: %v", m.Ranks, m.Lost, gone, dedicated, embedded, err)
	}
}

// TestJoinsUnderRandomLosses: ranks have more data than others, in turn, and join when they have none, while ranks and servers are lost. The others sum the same meanwhile,
// and all that are left hear the same of who was last.
func TestJoinsUnderRandomLosses(t *testing.T) {
	underLosses(t, "TestJoinsUnderRandomLosses", playJoins)
}

func playJoins(t *testing.T, seed uint64) {
	const rounds, pause = 30, 3 * time.Millisecond
	random := rand.New(rand.NewPCG(seed, 17))
	ranks, dedicated, servers, where, embedded := places(random)
	m := jobtest.NewMeans(random, ranks, 1+random.IntN(5000), 60, servers)
	gone := random.Perm(dedicated)[:random.IntN(max(dedicated, 1))]
	j, network := lendingOn(t, ranks, seed%2 == 1, where)
	revived(t, network, dedicated)
	j.Start()
	var script strings.Builder
	script.WriteString(losses(random, m, dedicated, embedded))
	for line := range strings.Lines(serverLosses(random, m, gone)) {
		if !strings.HasSuffix(line, " continue\n") { // where a rank was stopped as well, the one that alone has missed it may be given up instead
			script.WriteString(line)
		}
	}
	if err := network.Script(script.String()); err != nil {
		t.Fatal(err)
	}
	heard := make([][]string, ranks) // by rank: what it sums, and who is last
	errs := j.Outcomes(func(rank int) error {
		for round := range rounds {
			for i := range (rank + round) % ranks * 3 {
				time.Sleep(pause) // of virtual time: losses come between
				op := jobtest.Sum("x", m.Elements)
				if _, err := j.Do(rank, op); err != nil {
					return fmt.Errorf("round %d, sum %d: %w", round, i, err)
				}
				heard[rank] = append(heard[rank], fmt.Sprintf("round %d, sum %d: %d", round, i, op.Output[0]))
			}
			last, err := j.Join(rank)
			if err != nil {
				return fmt.Errorf("round %d, join: %w", round, err)
			}
			heard[rank] = append(heard[rank], fmt.Sprintf("round %d, last: %d", round, last))
		}
		return nil
	})
	said := map[string]string{}
	for rank, err := range errs {
		if slices.Contains(m.Lost, rank) {
			continue
		}
		if err != nil {
			t.Errorf("rank %d of %d, without ranks %v and servers %v of %d, embedded ones: %v: %v", rank, ranks, m.Lost, gone, dedicated, embedded, err)
		}
		for _, line := range heard[rank] {
			what, value, _ := strings.Cut(line, ": ")
			if other, known := said[what]; known && other != value {
				t.Errorf("%s is %s on rank %d and %s on another, without ranks %v and servers %v of %d, embedded ones: %v", what, value, rank, other, m.Lost, gone, dedicated, embedded)
			}
			said[what] = value
		}
	}
}

// places draws how many ranks a job has, and its servers: in processes of their own, in the workers, or both.
func places(random *rand.Rand) (ranks, dedicated, servers int, where jobtest.Option, embedded bool) {
	ranks, dedicated = 2+random.IntN(4), 1+random.IntN(4)
	where, servers = jobtest.Dedicated(dedicated), dedicated
	embedded = random.IntN(2) == 0
	switch {
	case embedded && random.IntN(2) == 0:
		where, dedicated, servers = jobtest.Embedded, 0, ranks
	case embedded:
		where, servers = jobtest.Both(dedicated), ranks+dedicated
	}
	return ranks, dedicated, servers, where, embedded
}

// losses is a script by which the lost ranks are lost.
func losses(random *rand.Rand, m *jobtest.Means, servers int, embedded bool) string {
	var script strings.Builder
	for _, rank := range m.Lost {
		at := time.Duration(random.IntN(1000)) * time.Millisecond
		peers := []string{} // that it has connections with, and whose loss of one of them is its own
		for i := range servers {
			peers = append(peers, serverName(i))
		}
		links := func(what string) {
			for _, peer := range peers {
				fmt.Fprintf(&script, "at %v worker%d<->%s %s\n", at, rank, peer, what)
			}
			for other := range m.Ranks {
				if embedded && other != rank {
					fmt.Fprintf(&script, "at %v worker%d<->worker%d %s\n", at, rank, other, what)
				}
			}
			fmt.Fprintf(&script, "at %v worker%d<->servers %s\n", at, rank, what)
		}
		how := random.IntN(6)
		if len(peers) == 0 && (how == 3 || how == 4) {
			how = 0
		}
		switch how {
		case 0:
			links("cut")
		case 1:
			links("reset")
		case 2:
			links("freeze")
		case 3: // one of its connections, in the middle of a frame
			fmt.Fprintf(&script, "after %d worker%d->%s cut\n", random.IntN(10*4*m.Elements), rank, peers[random.IntN(len(peers))])
		case 5: // it may come back in time, or find that it was given up
			fmt.Fprintf(&script, "at %v worker%d stop\nat %v worker%d continue\n", at, rank, at+time.Duration(random.IntN(10000))*time.Millisecond, rank)
		case 4:
			fmt.Fprintf(&script, "after %d %s->worker%d reset\n", random.IntN(10*4*m.Elements), peers[random.IntN(len(peers))], rank)
		}
	}
	return script.String()
}

// serverLosses is a script by which servers are lost: killed, between frames or within one, or silent for good or for a while.
func serverLosses(random *rand.Rand, m *jobtest.Means, gone []int) string {
	var script strings.Builder
	for _, i := range gone {
		at := time.Duration(random.IntN(1000)) * time.Millisecond
		switch random.IntN(4) {
		case 0:
			script.WriteString(cutOff(m.Ranks, i, at, "cut"))
		case 1:
			script.WriteString(cutOff(m.Ranks, i, at, "reset"))
		case 2:
			fmt.Fprintf(&script, "at %v server%d stop\nat %v server%d continue\n", at, i, at+time.Duration(random.IntN(10000))*time.Millisecond, i)
		case 3: // as it sends to one rank, in the middle of a frame
			fmt.Fprintf(&script, "after %d server%d->worker%d stop\n", random.IntN(10*4*m.Elements), i, random.IntN(m.Ranks))
		}
	}
	return script.String()
}
