package jobtest_test

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
)

// A synchronisation model as a user of the packages writes it: this file, and the line in init.
func init() {
	condition.Register("pack:S", func(a *condition.Arguments) (condition.Model, error) {
		s := a.Iterations("S", 1)
		return a.End(condition.Model{Name: fmt.Sprintf("pack:%d", s), Pull: pack{s}, Push: condition.EveryLive{}})
	})
}

// pack lets a rank be fewer than s iterations ahead of the slowest, as that rank has pushed them, closed or not.
type pack struct{ s uint64 }

func (c pack) Holds(v condition.View) bool { return v.Progress < v.V || v.Progress < v.Slowest+c.s }
func (c pack) Ahead() bool                 { return true }
func (c pack) String() string              { return fmt.Sprintf("i < slowest + %d", c.s) }

func TestAJobUnderAModelOfItsOwn(t *testing.T) {
	if p, err := condition.Properties("pack:2"); err != nil || !p.Ahead || p.Dataflow != condition.Accumulate {
		t.Fatalf("%+v, %v", p, err)
	}
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2)} {
		t.Run(place, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				j := jobtest.Start(t, 2, network, jobtest.SmallPartitions, option)
				j.Each(func(rank int) error { return addUp(j, rank, "summed", "pack:2", jobtest.Partition/4+1, 6) })
				values := make([]*jobtest.Held, 2)
				j.Each(func(rank int) (err error) {
					values[rank], err = j.Declare(rank, "w", "pack:2", 3)
					return err
				})
				ahead(t, values[0], 2)
				third := waits(t, j, values[0])
				synctest.Wait()
				select {
				case r := <-third:
					t.Fatalf("rank 0 leads by 2 and does not wait: %v", r.Err)
				default:
				}
				for range 3 { // parked lazily, it is answered at the latest when its iteration closes
					if err := values[1].Use(units.Add, 1); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := jobtest.Await(third, 0, "w"); err != nil {
					t.Fatal(err)
				}
			})
		})
	}
}
