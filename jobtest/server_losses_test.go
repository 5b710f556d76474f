package jobtest_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// TestAlltoallsGoOnWhileServersAreLost at any moment: before a rank puts what it gives, while others get it, when some have it and others not.
func TestAlltoallsGoOnWhileServersAreLost(t *testing.T) {
	underLosses(t, "TestAlltoallsGoOnWhileServersAreLost", func(t *testing.T, seed uint64) {
		const steps, names = 25, 3
		most := 1 + rand.New(rand.NewPCG(seed, 37)).IntN(3*jobtest.Partition)
		withoutServers(t, seed, 23, most, steps, func(j *jobtest.Job, rank, step int) error { return swap(j, rank, step, names, most, seed) })
	})
}

// withoutServers plays a job that loses all dedicated servers but one, or fewer; one may be drained meanwhile. No rank may fail.
func withoutServers(t *testing.T, seed, stream uint64, most, steps int, play func(j *jobtest.Job, rank, step int) error) {
	random := rand.New(rand.NewPCG(seed, stream))
	ranks, servers := 2+random.IntN(4), 2+random.IntN(3)
	m := jobtest.NewMeans(random, ranks, most, steps, servers)
	gone := random.Perm(servers)[:random.IntN(servers)]
	j, network := lendingOn(t, ranks, seed%2 == 1, jobtest.Dedicated(servers))
	j.Settings.Connections = 1 + random.IntN(2)
	revived(t, network, servers)
	j.Start()
	drained := -1
	if left := random.IntN(servers); len(gone)+2 <= servers && !slices.Contains(gone, left) {
		drained = left
	}
	if err := network.Script(serverLosses(random, m, gone)); err != nil {
		t.Fatal(err)
	}
	for rank, err := range j.Outcomes(func(rank int) error {
		if rank == 0 && drained >= 0 {
			j.StopServer(drained)
		}
		for step := range steps {
			if err := play(j, rank, step); err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("rank %d of %d, without servers %v and %d of %d: %v", rank, ranks, gone, drained, servers, err)
		}
	}
}

// swap has a rank do alltoalls at the same time, of as many bytes for each rank as all know.
func swap(j *jobtest.Job, rank, step, names, most int, seed uint64) error {
	ranks := len(j.Workers)
	var ops []worker.Op
	for name := range names {
		op := worker.Op{Kind: units.Alltoall, DType: units.Uint8, Name: fmt.Sprint("a", name)}
		for to := range ranks {
			part := swapped(step, name, rank, to, most, seed)
			op.Input, op.Splits = append(op.Input, part...), append(op.Splits, int64(len(part)))
		}
		op.Shape = []int64{int64(len(op.Input))}
		ops = append(ops, op)
	}
	results, err := j.Submit(rank, ops...)
	if err != nil {
		return err
	}
	for name, done := range results {
		out, err := jobtest.Await(done, rank, ops[name].Name)
		if err != nil {
			return err
		}
		var want []byte
		for from := range ranks {
			want = append(want, swapped(step, name, from, rank, most, seed)...)
		}
		if !bytes.Equal(out.Data, want) {
			return fmt.Errorf("%s gives %d bytes that are not the %d that were brought", ops[name].Name, len(out.Data), len(want))
		}
	}
	return nil
}

// swapped is what one rank gives another.
func swapped(step, name, from, to, most int, seed uint64) []byte {
	random := rand.New(rand.NewPCG(seed, uint64(((step*16+name)*16+from)*16+to)))
	return pattern(max(random.IntN(2*most)-most/2, 0), random.Uint64())
}

// TestMessagesGoOnWhileServersAreLost: each comes once and whole, in the order of its sender and tag, and each end ends, also where the receiver alone knows that it has come.
func TestMessagesGoOnWhileServersAreLost(t *testing.T) {
	underLosses(t, "TestMessagesGoOnWhileServersAreLost", func(t *testing.T, seed uint64) {
		const steps = 20
		most := 1 + rand.New(rand.NewPCG(seed, 31)).IntN(100000)
		withoutServers(t, seed, 29, most, steps, func(j *jobtest.Job, rank, step int) error { return letters(j, rank, step, most, seed) })
	})
}

// letters has a rank send some messages to each other one, and receive theirs, in an order of its own; and one from whoever sends it first.
func letters(j *jobtest.Job, rank, step, most int, seed uint64) error {
	const each, anyTag = 3, 99
	ranks := len(j.Workers)
	random := rand.New(rand.NewPCG(seed, uint64(step*16+rank)))
	tag := uint64(step % 2)
	type end struct {
		op   worker.Op
		want func(from int) []byte // of a receive
	}
	var queues [][]end // whose order is kept
	for other := range ranks {
		if other == rank {
			continue
		}
		var sends, receives []end
		for i := range each {
			want := swapped(step, i, other, rank, most, seed)
			sends = append(sends, end{op: send(other, tag, swapped(step, i, rank, other, most, seed))})
			receives = append(receives, end{receive(other, tag, make([]byte, len(want))), func(int) []byte { return want }})
		}
		queues = append(queues, sends, receives)
	}
	next := (rank + 1 + step%(ranks-1)) % ranks
	queues = append(queues, []end{{op: send(next, anyTag, []byte{byte(step), byte(rank)})}},
		[]end{{receive(worker.AnyRank, anyTag, make([]byte, 2)), func(from int) []byte { return []byte{byte(step), byte(from)} }}})
	var ends []end
	var ops []worker.Op
	for len(queues) > 0 {
		i := random.IntN(len(queues))
		ends, ops = append(ends, queues[i][0]), append(ops, queues[i][0].op)
		if queues[i] = queues[i][1:]; len(queues[i]) == 0 {
			queues = slices.Delete(queues, i, i+1)
		}
	}
	results, err := j.Submit(rank, ops...)
	if err != nil {
		return err
	}
	for i, done := range results {
		out, err := jobtest.Await(done, rank, fmt.Sprintf("%v, other end %d, tag %d", ops[i].Kind, ops[i].Root, ops[i].Tag))
		if err != nil {
			return err
		}
		if ends[i].want != nil && !bytes.Equal(ops[i].Output, ends[i].want(out.Value)) {
			return fmt.Errorf("the message from rank %d with tag %d has other bytes", out.Value, ops[i].Tag)
		}
	}
	return nil
}

// TestASenderHearsOfAReceiveThatIsGivenUpAsItsMessageComes, and waits no longer.
func TestASenderHearsOfAReceiveThatIsGivenUpAsItsMessageComes(t *testing.T) {
	for _, n := range []int{10, 200000} {
		synctest.Test(t, func(t *testing.T) {
			j, network := apartOn(t, 2, jobtest.Dedicated(2))
			j.Start()
			op := receive(0, 3, make([]byte, n))
			op.Timeout = 100 * time.Millisecond
			received, err := j.Submit(1, op)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond) // of virtual time: the server has heard of the receive
			if err := network.Script("at 0s server1->worker1 freeze\nat 500ms server1->worker1 thaw"); err != nil {
				t.Fatal(err)
			}
			sent, err := j.Submit(0, send(1, 3, make([]byte, n)))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := jobtest.Await(received[0], 1, "the receive"); err == nil || !strings.Contains(err.Error(), "its timeout") {
				t.Errorf("the receive ends with %v", err)
			}
			select {
			case r := <-sent[0]:
				if r.Err == nil || !strings.Contains(r.Err.Error(), "rank 1 has given up its receive") {
					t.Errorf("the send ends with %v", r.Err)
				}
			case <-time.After(20 * time.Second):
				t.Error("the send waits on")
			}
		})
	}
}

// TestPiecesGoToTheHeirThatWantsThem, also while what was on the lost server is still being brought there.
func TestPiecesGoToTheHeirThatWantsThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{PeerTimeout: 3 * time.Second}) // no latency: the heir answers at once
		t.Cleanup(network.Close)
		j := jobtest.Start(t, 2, jobtest.Dedicated(2), jobtest.Elastic, eachOn(network))
		revived(t, network, 2)
		const long, many = 8_000_000, 30_000
		ops := []worker.Op{send(1, 1, pattern(long, 1))}
		for i := range many {
			ops = append(ops, send(1, uint64(100+i), nil)) // which nobody receives
		}
		sent, err := j.Submit(0, ops...)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) // of virtual time: all have been offered
		script := func(text string) {
			if err := network.Script(text); err != nil {
				t.Error(err)
			}
		}
		script("at 0s worker0->server1 rate 1000000")
		time.Sleep(time.Millisecond) // the script has begun
		got := make([]byte, long)
		received, err := j.Submit(1, receive(0, 1, got))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // the pieces are on their way
		script("at 0s server1 stop\n" + cutOff(2, 1, 0, "reset"))
		for i, end := range []chan jobtest.Result{received[0], sent[0]} {
			select {
			case r := <-end:
				if r.Err != nil {
					t.Errorf("end %d: %v", i, r.Err)
				}
			case <-time.After(20 * time.Second):
				t.Errorf("end %d waits on", i)
			}
		}
		if !bytes.Equal(got, pattern(long, 1)) {
			t.Error("other bytes")
		}
	})
}

// TestAllRanksThatAreLeftHaveAnAlltoallOrNone: a rank is lost with the server that has told some that all have all, and not others.
func TestAllRanksThatAreLeftHaveAnAlltoallOrNone(t *testing.T) {
	const ranks, names = 4, 6
	for late := 3000; late <= 5500; late += 500 {
		for name := range names {
			synctest.Test(t, func(t *testing.T) {
				network := transporttest.NewNetwork(transporttest.Options{Latency: time.Millisecond, PeerTimeout: 3 * time.Second})
				t.Cleanup(network.Close)
				j := jobtest.Start(t, ranks, jobtest.Elastic, jobtest.SmallPartitions, eachOn(network))
				script := func(text string) {
					if err := network.Script(text); err != nil {
						t.Error(err)
					}
				}
				t.Cleanup(func() { script("at 0s worker0 continue") })
				use := func(rank, name int) error {
					op := worker.Op{Kind: units.Alltoall, DType: units.Uint8, Name: fmt.Sprint("a", name), Shape: []int64{ranks, 100}, Input: bytes.Repeat(pattern(100, uint64(rank)), ranks)}
					_, err := j.Do(rank, op)
					return err
				}
				for i := range names { // whose keys are on all servers
					j.Each(func(rank int) error { return use(rank, i) })
				}
				script(fmt.Sprintf("at %dus worker0->worker2 freeze", late))
				var killing sync.WaitGroup
				killing.Go(func() {
					time.Sleep(20 * time.Millisecond) // of virtual time: ranks 1 and 3 have the last word
					script("at 0s servers->worker1 freeze\nat 0s servers->worker3 freeze\nat 50ms servers->worker1 thaw\nat 50ms servers->worker3 thaw\n")
					script(killed(ranks, 0))
				})
				errs := j.Outcomes(func(rank int) error { return use(rank, name) })[1:]
				killing.Wait()
				if (errs[0] == nil) != (errs[1] == nil) || (errs[0] == nil) != (errs[2] == nil) {
					t.Errorf("a%d, rank 0's word to rank 2 lost from %d µs on: %v", name, late, errs)
				}
			})
		}
	}
}
