package jobtest_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

func send(to int, tag uint64, data []byte) worker.Op {
	return worker.Op{Kind: units.Send, DType: units.Uint8, Root: to, Tag: tag, Shape: []int64{int64(len(data))}, Input: data}
}

func receive(from int, tag uint64, into []byte) worker.Op {
	return worker.Op{Kind: units.Receive, DType: units.Uint8, Root: from, Tag: tag, Shape: []int64{int64(len(into))}, Output: into}
}

// pattern is n bytes that tell messages apart.
func pattern(n int, seed uint64) []byte {
	b := make([]byte, n)
	random := rand.New(rand.NewPCG(seed, 0))
	for i := 0; i < n; i += 1 + i/64 {
		b[i] = byte(random.Uint32())
	}
	return b
}

// everywhere runs a test with each place for servers, over TCP, shared memory and the twin.
func everywhere(t *testing.T, ranks int, test func(t *testing.T, j *jobtest.Job)) {
	t.Helper()
	for place, servers := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2), "both": jobtest.Both(1)} {
		for over, network := range map[string]func(t *testing.T) jobtest.Option{
			"tcp":    func(*testing.T) jobtest.Option { return jobtest.Embedded },
			"shm":    func(*testing.T) jobtest.Option { return jobtest.With(overSharedMemory) },
			"memory": func(t *testing.T) jobtest.Option { return jobtest.InMemory(t) },
		} {
			t.Run(fmt.Sprintf("%d ranks, %s, %s", ranks, place, over), func(t *testing.T) {
				test(t, jobtest.Start(t, ranks, network(t), servers))
			})
		}
	}
}

// TestMessagesOfAnyLengthArriveAsTheyWereSent, between all pairs of ranks at once, in both directions and to oneself.
func TestMessagesOfAnyLengthArriveAsTheyWereSent(t *testing.T) {
	for _, ranks := range []int{2, 4} {
		everywhere(t, ranks, func(t *testing.T, j *jobtest.Job) {
			for _, n := range []int{0, 1, 1000, limits.MaxEager, limits.MaxEager + 1, 9_000_001} {
				j.Each(func(rank int) error {
					var ops []worker.Op
					for peer := range ranks {
						ops = append(ops, send(peer, uint64(n), pattern(n, uint64(100*rank+peer))), receive(peer, uint64(n), make([]byte, n)))
					}
					done, err := j.Submit(rank, ops...)
					if err != nil {
						return err
					}
					for i, op := range ops {
						out, err := jobtest.Await(done[i], rank, fmt.Sprint(op.Kind, op.Root))
						if err != nil {
							return err
						}
						if op.Kind == units.Receive && (out.Value != op.Root || !bytes.Equal(op.Output, pattern(n, uint64(100*op.Root+rank)))) {
							return fmt.Errorf("other bytes than rank %d sent, or of rank %d", op.Root, out.Value)
						}
					}
					return nil
				})
			}
		})
	}
}

// TestMessagesOfOneTagKeepTheirOrder: ten thousand small ones, with longer ones between them, whether the receiver is ahead or behind.
func TestMessagesOfOneTagKeepTheirOrder(t *testing.T) {
	for name, ahead := range map[string]bool{"receives first": true, "sends first": false} {
		t.Run(name, func(t *testing.T) {
			everywhere(t, 2, func(t *testing.T, j *jobtest.Job) {
				count := 10_000
				if j.Settings.Servers != "embedded" || race {
					count = 2000
				}
				length := func(i int) int {
					if i%1000 == 7 {
						return limits.MaxEager + i
					}
					return 8 + i%50
				}
				first := make(chan struct{})
				j.Each(func(rank int) error {
					if (rank == 1) != ahead {
						<-first
					} else {
						defer close(first)
					}
					var done []chan jobtest.Result
					var ops []worker.Op
					for i := range count {
						op := send(1, 7, pattern(length(i), uint64(i)))
						if rank == 1 {
							op = receive(0, 7, make([]byte, length(i)))
						}
						one, err := j.Submit(rank, op)
						if err != nil {
							return err
						}
						ops, done = append(ops, op), append(done, one...)
						if i == count/2 && (rank == 1) == ahead {
							first <- struct{}{}
						}
					}
					for i, op := range ops {
						if _, err := jobtest.Await(done[i], rank, fmt.Sprint("message ", i)); err != nil {
							return err
						}
						if rank == 1 && !bytes.Equal(op.Output, pattern(length(i), uint64(i))) {
							return fmt.Errorf("receive %d has another message", i)
						}
					}
					return nil
				})
			})
		})
	}
}

// TestAReceiveFromAnyRankSaysWhoSent, and takes each message once, of one tag alone.
func TestAReceiveFromAnyRankSaysWhoSent(t *testing.T) {
	everywhere(t, 4, func(t *testing.T, j *jobtest.Job) {
		const each, n = 5, limits.MaxEager + 10
		j.Each(func(rank int) error {
			if rank > 0 {
				for i := range each {
					if _, err := j.Do(rank, send(0, 1<<63|5, pattern(n, uint64(10*rank+i)))); err != nil {
						return err
					}
				}
				_, err := j.Do(rank, send(0, 4, nil))
				return err
			}
			seen := map[int]uint64{}
			for range 3 * each {
				op := receive(worker.AnyRank, 1<<63|5, make([]byte, n))
				out, err := j.Do(0, op)
				if err != nil {
					return err
				}
				if !bytes.Equal(op.Output, pattern(n, uint64(10*out.Value)+seen[out.Value])) {
					return fmt.Errorf("message %d of rank %d has other bytes", seen[out.Value], out.Value)
				}
				seen[out.Value]++
			}
			for from := range 3 {
				if _, err := j.Do(0, receive(from+1, 4, nil)); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// TestAWrongLengthIsAnErrorAtBothEnds that names ranks, tag and lengths, and what comes later does not meet it.
func TestAWrongLengthIsAnErrorAtBothEnds(t *testing.T) {
	everywhere(t, 2, func(t *testing.T, j *jobtest.Job) {
		for _, lengths := range [][2]int{{10, 11}, {11, 10}, {0, 1}, {200_000, 1}, {1, 200_000}, {200_000, 200_001}} {
			sent, room := lengths[0], lengths[1]
			errs := j.Outcomes(func(rank int) error {
				op := send(1, 9, make([]byte, sent))
				if rank == 1 {
					op = receive(0, 9, make([]byte, room))
				}
				_, err := j.Do(rank, op)
				return err
			})
			for rank, want := range []string{
				fmt.Sprintf("send to rank 1 with tag 9 on rank 0: it has %d bytes, where rank 1 receives %d", sent, room),
				fmt.Sprintf("receive from rank 0 with tag 9 on rank 1: there is room for %d bytes, where rank 0 sends %d", room, sent),
			} {
				if errs[rank] == nil || !strings.Contains(errs[rank].Error(), want) {
					t.Errorf("rank %d: %v, want %q", rank, errs[rank], want)
				}
			}
		}
		j.Each(func(rank int) error {
			op := send(1, 9, pattern(300_000, 5))
			if rank == 1 {
				op = receive(0, 9, make([]byte, 300_000))
			}
			_, err := j.Do(rank, op)
			if err == nil && rank == 1 && !bytes.Equal(op.Output, pattern(300_000, 5)) {
				err = fmt.Errorf("other bytes")
			}
			return err
		})
		j.Works("a sum beside", 100_000)
	})
}

// TestTypesThatDoNotFitAreNamedAtBothEnds, where lengths differ, or the receiver may interpret bytes that are no such ones for the sender.
func TestTypesThatDoNotFitAreNamedAtBothEnds(t *testing.T) {
	everywhere(t, 2, func(t *testing.T, j *jobtest.Job) {
		for _, n := range []int{16, 400_000} {
			for _, room := range []int{n, 2 * n} {
				errs := j.Outcomes(func(rank int) error {
					op := send(1, 9, make([]byte, n))
					op.DType, op.Shape = units.Float32, []int64{int64(n / 4)}
					if rank == 1 {
						op = receive(0, 9, make([]byte, room))
						op.Authenticated = true
					}
					_, err := j.Do(rank, op)
					return err
				})
				for rank, err := range errs {
					sent, asked := fmt.Sprintf("%d bytes (%d of float32)", n, n/4), fmt.Sprintf("%d bytes (%d of uint8)", room, room)
					if !errors.Is(err, worker.ErrMismatch) || !says(err.Error(), sent, asked, fmt.Sprintf("rank %d", 1-rank), "with tag 9") {
						t.Errorf("%d bytes for %d, rank %d: %v", n, room, rank, err)
					}
				}
			}
		}
		j.Works("a sum beside", 100_000)
	})
}

// TestAMessageHasTheNameThatItsTagHasForTheCaller in warnings and errors, and meets one without.
func TestAMessageHasTheNameThatItsTagHasForTheCaller(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		heard := make(chan string, 10)
		j := jobtest.Start(t, 2, network, jobtest.Stalls(time.Second, 0), jobtest.Warnings(heard))
		op := receive(1, 7<<32|3, make([]byte, 4))
		op.Name = "tag 3 of group 'x'"
		late := op
		late.Timeout = 25 * time.Second
		if _, err := j.Do(0, late); err == nil || !says(err.Error(), "receive from rank 1 with tag 3 of group 'x' on rank 0 has waited 25s") {
			t.Errorf("%v, want the name of the tag", err)
		}
		j.Hears(heard, "receive from rank 1 with tag 3 of group 'x' has waited")
		j.Each(func(rank int) error {
			end := op
			if rank == 1 {
				end = send(0, 7<<32|3, []byte("four"))
			}
			_, err := j.Do(rank, end)
			return err
		})
	})
}

// TestManyReceivesThatWaitAreOneWarning a period, however the caller calls their tags.
func TestManyReceivesThatWaitAreOneWarning(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		heard := make(chan string, 1000)
		j := jobtest.Start(t, 2, network, jobtest.Stalls(time.Second, 0), jobtest.Warnings(heard))
		ends := make([]chan jobtest.Result, 200)
		for i := range ends {
			op := receive(1, uint64(i), make([]byte, 4))
			op.Name = fmt.Sprint("tag ", i, " of group 'x'")
			done, err := j.Submit(0, op)
			if err != nil {
				t.Fatal(err)
			}
			ends[i] = done[0]
		}
		time.Sleep(30 * time.Second)
		if n := len(heard); n == 0 || n > 30 {
			t.Errorf("%d warnings in 30 s", n)
		}
		for i := range ends {
			if _, err := j.Do(1, send(0, uint64(i), []byte("four"))); err != nil {
				t.Fatal(err)
			}
			<-ends[i]
		}
	})
}

// TestAnEndOfAMessageThatWaitsTooLongIsGivenUp with an error that says for whom, and the next message arrives.
func TestAnEndOfAMessageThatWaitsTooLongIsGivenUp(t *testing.T) {
	everywhere(t, 2, func(t *testing.T, j *jobtest.Job) {
		for _, n := range []int{5, 500_000} {
			for want, op := range map[string]worker.Op{
				"send to rank 1 with tag 3 on rank 0 has waited 20ms for rank 1 to receive it, its timeout":       send(1, 3, make([]byte, n)),
				"receive from rank 1 with tag 3 on rank 0 has waited 20ms for rank 1 to send it, its timeout":     receive(1, 3, make([]byte, n)),
				"receive from any rank with tag 3 on rank 0 has waited 20ms for any rank to send it, its timeout": receive(worker.AnyRank, 3, make([]byte, n)),
			} {
				op.Timeout = 20 * time.Millisecond
				if _, err := j.Do(0, op); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			}
			j.Each(func(rank int) error {
				op, behind := send(1, 3, pattern(n, 8)), send(1, 4, nil) // what was given up has been heard of before this
				if rank == 1 {
					op, behind = receive(0, 3, make([]byte, n)), receive(0, 4, nil)
				}
				if _, err := j.Do(rank, behind); err != nil {
					return err
				}
				_, err := j.Do(rank, op)
				if err == nil && rank == 1 && !bytes.Equal(op.Output, pattern(n, 8)) {
					err = fmt.Errorf("other bytes")
				}
				return err
			})
		}
	})
}

// TestALostRankEndsTheMessagesThatWait on every other, with an error that names the message and the lost rank: a rank whose process
// is killed, and one that is stopped, before a message is received, and in the middle of one.
func TestALostRankEndsTheMessagesThatWait(t *testing.T) {
	for _, servers := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(1), jobtest.Both(1)} {
		for _, ends := range []string{"killed", "stopped"} {
			for _, n := range []int{10, 30 << 20} {
				t.Run(fmt.Sprint(ends, " ", n), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { losesARank(t, servers, ends, n) })
				})
			}
		}
	}
}

func losesARank(t *testing.T, servers jobtest.Option, ends string, n int) {
	network := transporttest.NewNetwork(transporttest.Options{Latency: time.Millisecond, Bandwidth: 1 << 30, PeerTimeout: 2 * time.Second})
	t.Cleanup(network.Close)
	watch := &transporttest.Watch{Hold: func(string, wire.Type) time.Duration { return 0 }, Read: func(wire.Type) {}}
	j := jobtest.Start(t, 3, servers, jobtest.With(func(s *settings.Settings) { s.PeerTimeout = 2 * time.Second }), jobtest.Transports(func(rank int) *transport.Set {
		return transport.NewSet(nil, network.Watched(nodeName(rank), []byte(jobtest.Secret), watch))
	}))
	begin := time.Now()
	waits := map[string]chan jobtest.Result{}
	submit := func(rank int, text string, op worker.Op) {
		done, err := j.Submit(rank, op)
		if err != nil {
			t.Fatal(err)
		}
		waits[fmt.Sprintf("%s on rank %d", text, rank)] = done[0]
	}
	submit(0, "receive from rank 1 with tag 1", receive(1, 1, make([]byte, n)))
	submit(0, "receive from any rank with tag 2", receive(worker.AnyRank, 2, make([]byte, n)))
	submit(0, "send to rank 1 with tag 3", send(1, 3, make([]byte, n)))
	submit(2, "send to rank 1 with tag 3", send(1, 3, make([]byte, n)))
	if n > limits.MaxEager { // and one in the middle, each way
		for _, op := range []worker.Op{receive(0, 4, make([]byte, n)), send(0, 5, make([]byte, n))} {
			if _, err := j.Submit(1, op); err != nil {
				t.Fatal(err)
			}
		}
		submit(0, "send to rank 1 with tag 4", send(1, 4, make([]byte, n)))
		submit(0, "receive from rank 1 with tag 5", receive(1, 5, make([]byte, n)))
		time.Sleep(10 * time.Millisecond) // of the 30 that the bytes take
	}
	if ends == "killed" {
		watch.Kill("worker1")
	} else if err := network.Script("at 0s worker1 stop"); err != nil {
		t.Fatal(err)
	}
	for text, done := range waits {
		_, err := jobtest.Await(done, 0, text)
		if !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), "worker 1") {
			t.Errorf("%s: %v, want worker 1 lost", text, err)
		}
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	if ends == "stopped" {
		if err := network.Script("at 0s worker1 continue"); err != nil {
			t.Fatal(err)
		}
	}
}

// TestARankThatShutsDownEndsTheMessagesThatWaitForIt, and no other.
func TestARankThatShutsDownEndsTheMessagesThatWaitForIt(t *testing.T) {
	for name, servers := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(1)} {
		t.Run(name, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				j := jobtest.Start(t, 3, network, servers)
				ops := []worker.Op{receive(1, 1, make([]byte, 9)), send(1, 2, make([]byte, 9)), send(1, 3, make([]byte, 500_000)), receive(worker.AnyRank, 4, make([]byte, 9))}
				done, err := j.Submit(0, ops...)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := j.Submit(1, send(0, 5, []byte("last"))); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				left := j.Leave(1)
				for i, op := range ops[:3] {
					_, err := jobtest.Await(done[i], 0, op.Kind.String())
					if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("rank 1 with tag %d on rank 0", i+1)) && !strings.Contains(err.Error(), "has shut down") {
						t.Errorf("%v: %v, want an error that says who has left", op.Kind, err)
					}
				}
				_, err = j.Do(2, send(0, 4, make([]byte, 9)))
				if _, also := jobtest.Await(done[3], 0, "receive from any"); err != nil || also != nil {
					t.Errorf("from the rank that is left: %v, %v", err, also)
				}
				j.Shutdown()
				<-left
			})
		})
	}
}
