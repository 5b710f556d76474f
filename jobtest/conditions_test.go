package jobtest_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// ahead has rank 0 end a number of iterations without a wait.
func ahead(t *testing.T, v *jobtest.Held, iterations int) {
	t.Helper()
	for range iterations {
		if err := v.Use(units.Add|units.Read, 1); err != nil {
			t.Fatal(err)
		}
	}
}

func waits(t *testing.T, j *jobtest.Job, v *jobtest.Held) chan jobtest.Result {
	t.Helper()
	results, err := j.Submit(v.Rank, v.Op(units.Add|units.Read, 1))
	if err != nil {
		t.Fatal(err)
	}
	return results[0]
}

func TestConditionsChangeAtTheIterationThatAllServersAgreeOn(t *testing.T) {
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2), "pairs": jobtest.Pairs(2)} {
		t.Run(place, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				j := jobtest.Start(t, 2, network, jobtest.SmallPartitions, option)
				values := make([]*jobtest.Held, 2)
				j.Each(func(rank int) (err error) {
					values[rank], err = j.Declare(rank, "w", "asp", 5*jobtest.Partition/4)
					return err
				})
				ahead(t, values[0], 5)
				at, err := j.Workers[1].Engine.SetCondition(t.Context(), nil, wire.Condition{Names: []string{"w*"}, Pull: "bsp"})
				if err != nil || at != 5 {
					t.Fatalf("from iteration %d, %v; want 5", at, err)
				}
				ahead(t, values[0], 1) // rank 1 has closed none yet, so the old one holds
				for range 5 {
					if err := values[1].Use(units.Add, 1); err != nil {
						t.Fatal(err)
					}
				}
				if err := values[1].Use(units.ReadNow, 0); err != nil { // its pushes have arrived
					t.Fatal(err)
				}
				held := waits(t, j, values[0]) // iteration 6 under BSP
				for range 2 {
					synctest.Wait()
					select {
					case r := <-held:
						t.Fatalf("rank 0 does not wait under the new condition: %v", r.Err)
					default:
					}
					if err := values[1].Use(units.Add, 1); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := jobtest.Await(held, 0, "w"); err != nil {
					t.Fatal(err)
				}
				if at, err = j.Workers[0].Engine.SetCondition(t.Context(), nil, wire.Condition{Pull: "ssp:100"}); err != nil || at != 7 {
					t.Fatalf("from iteration %d, %v; want 7", at, err)
				}
				ahead(t, values[0], 20) // all have pushed 7, so it holds at once
			})
		})
	}
}

func TestDifferentServersUnderDifferentModels(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network, jobtest.SmallPartitions)
		names := []string{"a", "b", "c", "d"} // on both servers, whatever the placement
		values := map[string][]*jobtest.Held{}
		for _, n := range names {
			values[n] = make([]*jobtest.Held, 2)
			j.Each(func(rank int) (err error) {
				values[n][rank], err = j.Declare(rank, n, "", 1)
				return err
			})
		}
		if _, err := j.Workers[0].Engine.SetCondition(t.Context(), []int{1}, wire.Condition{Pull: "asp"}); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, len(names))
		for _, n := range names {
			held := waits(t, j, values[n][0])
			go func() {
				_, err := jobtest.Await(held, 0, n)
				done <- err
			}()
		}
		for range 2 { // round-robin: two values lie on each server
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("a third value does not wait for rank 1: %v", err)
		default:
		}
		for _, n := range names {
			if err := values[n][1].Use(units.Add|units.Read, 1); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestAConditionThatDoesNotFitChangesNothing(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network)
		j.Works("sum", 100)
		values := make([]*jobtest.Held, 2)
		j.Each(func(rank int) (err error) {
			values[rank], err = j.Declare(rank, "w", "", 10)
			return err
		})
		for _, c := range []struct {
			w       wire.Condition
			servers []int
			text    string
		}{
			{wire.Condition{Names: []string{"sum"}, Pull: "ssp:2"}, nil, "declare the tensor as accumulate"},
			{wire.Condition{Names: []string{"*"}, Pull: "ssp:2"}, nil, "declare the tensor as accumulate"},
			{wire.Condition{Names: []string{"sum"}, Push: "drop-stragglers:1"}, nil, "drop-stragglers:2"},
			{wire.Condition{Push: "drop-stragglers:3"}, nil, "allowed is from 1 to 2"},
			{wire.Condition{Names: []string{"nobody"}, Pull: "asp"}, nil, "no tensor in use"},
			{wire.Condition{Names: []string{"[w"}, Pull: "asp"}, nil, "not a pattern of names"},
			{wire.Condition{Pull: "expression:1/V > 2"}, nil, "V"},
			{wire.Condition{Pull: "ssp:-1"}, nil, "-1"},
			{wire.Condition{Pull: "elastic:15"}, nil, "supersteps"},
			{wire.Condition{Pull: "expression:lead < 1 || significance < 0.01"}, nil, "which optimizers do not send under bsp"},
			{wire.Condition{Pull: "dynamic-pssp:2,significance"}, nil, "which optimizers do not send under bsp"},
			{wire.Condition{Pull: "asp"}, []int{2}, "server 2, the job has 2"},
		} {
			_, err := j.Workers[0].Engine.SetCondition(t.Context(), c.servers, c.w)
			if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%+v: %v, want it to say %q", c.w, err, c.text)
			}
		}
		reads := "dynamic-pssp:2,significance"
		j.Each(func(rank int) error {
			_, err := j.Declare(rank, "reads", reads, 10)
			return err
		})
		if _, err := j.Workers[0].Engine.SetCondition(t.Context(), nil, wire.Condition{Names: []string{"reads"}, Pull: "expression:lead < 1 || significance < 0.01"}); err != nil {
			t.Errorf("a value whose ranks send their significance: %v", err)
		}
		held := waits(t, j, values[0]) // under BSP as before
		synctest.Wait()
		select {
		case r := <-held:
			t.Fatalf("rank 0 does not wait: %v", r.Err)
		default:
		}
		if err := values[1].Use(units.Add, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := jobtest.Await(held, 0, "w"); err != nil {
			t.Fatal(err)
		}
		j.Works("sum", 100)
	})
}

// A model that is set while training runs tunes its pull condition too: a rank ten times as fast as the other leads by more
// than the lower end of the range.
func TestDSPSIsTunedWhereItIsSetLater(t *testing.T) {
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(1)} {
		t.Run(place, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				j := jobtest.Start(t, 2, jobtest.SmallPartitions, option, network)
				var done [2]atomic.Int64
				most := int64(0)
				j.Each(func(rank int) error {
					v, err := j.Declare(rank, "w", "ssp:3", 5)
					if err == nil && rank == 0 {
						_, err = j.Workers[0].Engine.SetCondition(t.Context(), nil, wire.Condition{Pull: "dsps:3,15"})
					}
					for range []int{400, 40}[rank] {
						if err != nil {
							return err
						}
						time.Sleep([]time.Duration{10, 95}[rank] * time.Millisecond) // it computes
						if err = v.Use(units.Add|units.Read, 1); err == nil {
							done[rank].Add(1)
						}
						if rank == 0 && done[1].Load() < 40 {
							most = max(most, done[0].Load()-done[1].Load())
						} else if rank == 0 {
							break
						}
					}
					j.Leave(rank)
					return err
				})
				if most < 5 || most > 15 {
					t.Errorf("the fast rank leads by %d at most", most)
				}
			})
		})
	}
}
