package jobtest_test

import (
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// Operations that begin while their round ends must end too, in process as over connections.
func TestALossEndsUsesOfHeldValuesThatAreJustBeginning(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{Latency: 50 * time.Microsecond, Bandwidth: 1 << 30}, func(t *testing.T, network jobtest.Option) {
		for round := range 15 {
			j := jobtest.Start(t, 2, network, jobtest.SmallPartitions)
			n := 40 * jobtest.Partition / 4
			values := make([]*jobtest.Held, 2)
			j.Each(func(rank int) (err error) {
				values[rank], err = j.Declare(rank, "w", "ssp:0", n)
				return err
			})
			results, err := j.Submit(0, values[0].Op(units.Add|units.Read, 1))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(round) * 100 * time.Microsecond) // the round ends at different points of the operation
			go j.Workers[0].Engine.Shutdown(t.Context())
			if _, err := jobtest.Await(results[0], 0, "w"); err == nil || strings.Contains(err.Error(), "hangs") {
				t.Fatalf("round %d: %v", round, err)
			}
			j.Shutdown()
		}
	})
}

// The server of a rank outside a process set stays for the values of the set too.
func TestAServerStaysForTheValuesOfASetThatItsRankIsNotIn(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 3, network, jobtest.SmallPartitions)
		sets := make([]wire.ProcessSet, 3)
		j.Each(func(rank int) (err error) {
			sets[rank], err = j.Workers[rank].Control.AddSet(t.Context(), []int{0, 1})
			return err
		})
		use := func(rank int, how units.Use) error {
			v := j.Held(rank, "w", "ssp:1", 6*jobtest.Partition/4)
			op := v.Op(how, 1)
			op.Set = sets[rank]
			_, err := j.Do(rank, op)
			return err
		}
		both := func(how units.Use) {
			t.Helper()
			j.Each(func(rank int) error {
				if rank == 2 {
					return nil
				}
				return use(rank, how)
			})
		}
		both(units.Declare)
		select {
		case <-j.Leave(2):
			t.Fatal("the server is gone")
		case <-time.After(11 * time.Second):
		}
		both(units.Add | units.Read)
	})
}
