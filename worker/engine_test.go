package worker_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// Scales must be finite numbers.
func TestScalesMustBeFinite(t *testing.T) {
	perform(t, 1, 1, nil, func(th *theatre) {
		for _, scales := range [][2]float64{{math.NaN(), 1}, {1, math.NaN()}, {math.Inf(1), 1}, {0, math.Inf(-1)}} {
			op := worker.Op{Kind: units.Allreduce, DType: units.Uint8, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Name: "x", Prescale: scales[0], Postscale: scales[1]}
			op.Shape, op.Input, op.Output = []int64{1}, []byte{1}, []byte{1}
			if err := th.engine.Submit([]worker.Op{op}); !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "must be finite numbers") {
				th.t.Errorf("scales %v: %v", scales, err)
			}
		}
	})
}

// A server reports the consumed bytes of each connection on its own. Bytes that it has not reported yet hold credit;
// over all connections they must leave some, or nothing would be sent any more.
func TestUnreportedBytesLeaveCreditHoweverManyConnections(t *testing.T) {
	for _, conns := range []int{1, 2, 8, 64} {
		const credit = 64 << 10
		perform(t, 1, conns, func(c *worker.Config) { c.Credit = credit }, func(th *theatre) {
			if held := th.servers[0].hello.Window * uint64(conns); held == 0 || held > credit/2 {
				th.t.Errorf("%d connections may hold %d of %d bytes of credit", conns, held, credit)
			}
		})
	}
}

// The caller gets the memory that the engine has allocated for a result, also with an error.
func TestFailedAllgatherHandsItsMemoryOver(t *testing.T) {
	perform(t, 1, 1, nil, func(th *theatre) {
		s := th.servers[0]
		go func() {
			_ = s.frames(s.conns[0], func(h wire.Header, _ []byte) {
				switch h.Type {
				case wire.TypePush: // the numbers of rows
					h.Type, h.Flags = wire.TypeResult, 0
					s.send(s.conns[0], h, binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(nil, 3+1), 4+1))
				case wire.TypeGet:
					_ = s.conns[0].Close()
				}
			})
		}()
		type result struct {
			out worker.Output
			err error
		}
		done := make(chan result, 1)
		err := th.engine.Submit([]worker.Op{{
			Kind: units.Allgather, DType: units.Uint8, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{3}, Input: make([]byte, 3),
			Prescale: 1, Postscale: 1, Name: "x", Done: func(out worker.Output, err error) { done <- result{out, err} },
		}})
		if err != nil {
			th.t.Fatal(err)
		}
		if r := <-done; !errors.Is(r.err, worker.ErrPeerLost) || len(r.out.Data) != 7 {
			th.t.Errorf("got %d bytes and %v, want the 7 that were taken and the loss", len(r.out.Data), r.err)
		}
	})
}

// The end of a superstep is decided before this rank's first frames of the values have left: its reports reach no server
// before the announcement of their value.
func TestReportOfASuperstepFollowsTheAnnouncement(t *testing.T) {
	perform(t, 2, 2, func(c *worker.Config) { c.Credit = 1 }, func(th *theatre) {
		th.sum("before", 2*partBytes) // takes the credit of both servers
		done := make(chan error, 2)
		ops := make([]worker.Op, 2)
		for i := range ops {
			ops[i] = worker.Op{
				Kind: units.Accumulate, DType: units.Float32, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}},
				Root: 1, Shape: []int64{2 * partBytes / 4}, Output: make([]byte, 2*partBytes), Prescale: 1, Postscale: 1,
				Name:     fmt.Sprint("value", i),
				Declared: options.Declared{Sync: options.Sync{Model: "adaptive:1,1"}}, Held: worker.Held{Use: units.Declare, Group: "value0"},
				Done: func(_ worker.Output, err error) { done <- err },
			}
		}
		if err := th.engine.Submit(ops); err != nil {
			th.t.Fatal(err)
		}
		synctest.Wait()
		leader := th.ids - 1
		th.servers[0].send(th.servers[0].conns[0], wire.Header{Type: wire.TypeStop, Tensor: leader}, wire.Stop{Last: 1}.Append(nil))
		reports := make(chan wire.Header, 16)
		for _, s := range th.servers {
			for _, c := range s.conns {
				announced := map[uint32]bool{}
				go func() {
					_ = s.frames(c, func(h wire.Header, _ []byte) {
						switch h.Type {
						case wire.TypeAnnounce:
							announced[h.Tensor] = true
						case wire.TypeReport:
							if !announced[h.Tensor] {
								th.t.Errorf("report of tensor %d before its announcement", h.Tensor)
							}
							reports <- h
						}
					})
				}()
			}
		}
		for range 2 * len(th.servers) {
			select {
			case <-reports:
			case <-time.After(time.Minute):
				th.t.Error("a server has no report of a value that it holds")
			}
		}
	})
}

// silence is a scheduler that does not answer.
type silence struct{ worker.Control }

func (silence) Declare(ctx context.Context, _ []wire.Tensor) ([]wire.Placed, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A caller must be able to tell the failure of the operation from the end of a wait.
func TestDeclarationWithoutAnAnswerIsAStall(t *testing.T) {
	perform(t, 1, 1, func(c *worker.Config) { c.Control = silence{c.Control} }, func(th *theatre) {
		err := <-th.sum("new", 8)
		if !errors.Is(err, worker.ErrStall) || !strings.Contains(err.Error(), `"new" could not be declared`) {
			t.Error(err)
		}
	})
}

// A source's put of a partition away from home asks for no answer. Where the server refuses it for its epoch, the operation
// ends with an error while it waits for its home, and one that has ended is in the log.
func TestARefusedFrameWithoutAnAnswerEndsItsOperation(t *testing.T) {
	core, logged := observer.New(zap.WarnLevel)
	perform(t, 1, 1, func(c *worker.Config) { c.Log = zap.New(core) }, func(th *theatre) {
		s := th.servers[0]
		done := make(chan error, 1)
		buf := make([]byte, 2*partBytes)
		err := th.engine.Submit([]worker.Op{{
			Kind: units.Broadcast, DType: units.Uint8, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{2 * partBytes}, Input: buf, Output: buf,
			Prescale: 1, Postscale: 1, Name: "b", Done: func(_ worker.Output, err error) { done <- err },
		}})
		if err != nil {
			t.Fatal(err)
		}
		refused := make(chan wire.Header, 1)
		go func() {
			_ = s.frames(s.conns[0], func(h wire.Header, _ []byte) {
				if h.Type == wire.TypePut && h.Flags&wire.FlagHome == 0 {
					h.Type, h.Epoch, h.Length = wire.TypeEpoch, 5, 0
					s.send(s.conns[0], h, nil)
					refused <- h
				}
			})
		}()
		th.wantEnd(done, worker.ErrUnsupported, `"b"`, "is in epoch 5")
		s.send(s.conns[0], <-refused, nil)
		synctest.Wait()
	})
	if n := logged.FilterMessageSnippet("refused what this rank sent").Len(); n != 1 {
		t.Errorf("%d lines are logged of what was refused when its operation had ended: %v", n, logged.All())
	}
}

// A connection that ends in the middle of an answer says least of why: what is known of the loss a moment later is the
// operation's error, as of those that had no answer yet.
func TestAnAnswerThatBreaksOffFailsForTheReasonOfTheLoss(t *testing.T) {
	perform(t, 1, 1, nil, func(th *theatre) {
		s := th.servers[0]
		go func() {
			_ = s.frames(s.conns[0], func(h wire.Header, payload []byte) {
				if h.Type != wire.TypePush {
					return
				}
				h.Type, h.Flags = wire.TypeResult, 0
				answer := wire.AppendFrame(nil, h, payload)
				_ = s.conns[0].Send(net.Buffers{answer[:len(answer)-len(payload)/2]})
				_ = s.conns[0].Close()
			})
		}()
		done := th.sum("half", partBytes)
		th.engine.Flush(true)
		synctest.Wait()
		th.engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "its host burns"})
		th.wantEnd(done, worker.ErrPeerLost, `"half"`, "on rank 0", "worker 1", "its host burns")
	})
}

// Operations without a name are one name's: some are under way, the rest wait in their order, so that a server holds no more
// for a rank that is ahead of the others. All of them end, also where the engine does before.
func TestOperationsFarAheadWaitInTheWorker(t *testing.T) {
	const all = 2*limits.MaxAhead + 100
	for _, answered := range []int{all, 10} {
		perform(t, 1, 1, nil, func(th *theatre) {
			s := th.servers[0]
			var pushed atomic.Int64
			go func() {
				_ = s.frames(s.conns[0], func(h wire.Header, payload []byte) {
					if h.Type != wire.TypePush {
						return
					}
					pushed.Add(1)
					if h.Iteration < uint64(answered) {
						h.Type, h.Flags = wire.TypeResult, 0
						s.send(s.conns[0], h, payload)
					}
				})
			}()
			var ends []chan error
			for range all {
				ends = append(ends, th.sum("", 8))
			}
			th.engine.Flush(true)
			synctest.Wait()
			if answered < all && pushed.Load() != int64(answered)+limits.MaxAhead {
				t.Errorf("%d are pushed beside %d answers", pushed.Load(), answered)
			}
			if answered < all {
				th.engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "a test"})
			}
			for i, end := range ends {
				want := error(nil)
				if i >= answered {
					want = worker.ErrPeerLost
				}
				th.wantEnd(end, want)
			}
		})
	}
}

// Where an operation of an elastic job fails, one that waits in the worker for its end fails too. Servers hear of that: a rank that heard of
// the failure before it began the later one brings that in a later generation, and would wait for this rank.
func TestServersHearOfAnOperationThatFailsWhileItIsHeld(t *testing.T) {
	perform(t, 1, 2, elastic, func(th *theatre) {
		s := th.servers[0]
		pushed, told := make(chan []byte, 1), make(chan wire.Failure, 1)
		for _, c := range s.conns {
			go func() {
				_ = s.frames(c, func(h wire.Header, payload []byte) {
					switch h.Type {
					case wire.TypePush:
						h.Type, h.Flags = wire.TypeResult, 0
						pushed <- wire.AppendFrame(nil, h, payload)
					case wire.TypeFail:
						var f wire.Failure
						if err := wire.DecodeJSON(h.Type, payload, &f); err != nil {
							t.Error(err)
						}
						told <- f
					}
				})
			}()
		}
		first, second := th.sum("", partBytes), th.sum("", partBytes)
		th.engine.Flush(true)
		answer := <-pushed
		half := len(answer) / 2
		_ = s.conns[0].Send(net.Buffers{answer[:half]}) // the first one does not end while its answer is read
		synctest.Wait()
		failed, err := json.Marshal(wire.Failure{Code: units.FailMismatch, Name: "allreduce.noname", Text: "another shape"})
		if err != nil {
			t.Fatal(err)
		}
		s.send(s.conns[1], wire.Header{Type: wire.TypeFail}, failed)
		th.wantEnd(second, worker.ErrMismatch, "another shape")
		_ = s.conns[0].Send(net.Buffers{answer[half:]})
		th.wantEnd(first, worker.ErrMismatch, "another shape")
		synctest.Wait()
		select {
		case f := <-told:
			if f.Seq != 1 || f.Code != units.FailMismatch || f.Text != "another shape" {
				t.Errorf("the server hears %+v, want that operation 1 fails with operation 0", f)
			}
		default:
			t.Error("the server does not hear that operation 1 has failed")
		}
	})
}

// slow is an observer that holds up the end of an operation.
type slow struct{ ends, ended chan struct{} }

func (s slow) Ended(worker.Observed, []worker.Exchange, error) {
	close(s.ends)
	<-s.ended
}

// A thread that has submitted an operation may still be about to launch it when another one shuts down, and a timer to end it: Done
// is called before the shutdown returns.
func TestShutdownWaitsForOperationsThatOtherThreadsEnd(t *testing.T) {
	for what, timeout := range map[string]time.Duration{"failed before": 0, "timeout": time.Second} {
		t.Run(what, func(t *testing.T) {
			perform(t, 1, 1, nil, func(th *theatre) {
				s := slow{make(chan struct{}), make(chan struct{})}
				th.engine.Observe(s)
				if timeout == 0 {
					th.engine.Failed(wire.Failure{Name: "x", Text: "it failed on another rank"})
				}
				var told atomic.Bool
				go func() {
					err := th.engine.Submit([]worker.Op{{
						Kind: units.Broadcast, DType: units.Uint8, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{8}, Input: make([]byte, 8), Output: make([]byte, 8),
						Prescale: 1, Postscale: 1, Name: "x", Timeout: timeout, Done: func(worker.Output, error) { told.Store(true) },
					}})
					if err != nil {
						t.Error(err)
					}
				}()
				<-s.ends
				over := make(chan struct{})
				go func() {
					defer close(over)
					ctx, cancel := context.WithTimeout(th.t.Context(), time.Second)
					defer cancel()
					th.engine.Shutdown(ctx)
					if !told.Load() {
						t.Error("shut down before the operation's Done")
					}
				}()
				time.Sleep(time.Minute) // virtual: nothing else happens any more
				close(s.ended)
				<-over
			})
		})
	}
}
