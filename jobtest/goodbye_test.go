package jobtest_test

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// The root of a broadcast is done when its bytes have left and every rank is there. It may leave then,
// while servers still read its bytes and report their consumption.
func TestRootMayLeaveRightAfterItsBroadcast(t *testing.T) {
	const floats = 4 << 20
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(1)} {
		for range 5 {
			j := jobtest.Start(t, 2, place, jobtest.SmallPartitions)
			j.Each(func(rank int) error {
				op := jobtest.Float32s(units.Broadcast, "last", floats)
				if rank != 0 {
					clear(op.Output)
				}
				if _, err := j.Do(rank, op); err != nil {
					return err
				}
				j.Workers[rank].Shutdown()
				j.Workers[rank] = nil
				if ones := jobtest.Float32s(units.Broadcast, "", floats).Input; !bytes.Equal(op.Output, ones) {
					return errors.New("it has other bytes")
				}
				return nil
			})
		}
	}
}

// Ctrl-C, by which a rank ends whose init has failed, ends the stay of its server too.
func TestTheServerOfARankThatLeavesStaysNoLongerThanItShould(t *testing.T) {
	for _, options := range []jobtest.Option{jobtest.Embedded, jobtest.Elastic} {
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
			j := jobtest.Start(t, 3, network, options)
			j.Works("x", 200)
			stay, end := context.WithTimeout(t.Context(), 2*time.Second)
			defer end()
			began := time.Now()
			j.Workers[2].Leave(stay)
			j.Workers[2] = nil
			if took := time.Since(began); took < 2*time.Second || took > 3*time.Second {
				t.Errorf("it stayed for %v, want 2 s", took)
			}
		})
	}
}

// A rank whose trace cannot be written says so before the others count on it.
func TestATimelineThatCannotBeWrittenIsAnErrorBeforeTheJobForms(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.New(t, 2, network, jobtest.Elastic)
		j.Settings.Timeline = filepath.Join(t.TempDir(), "missing", "trace.json")
		began := time.Now()
		err := j.StartRank(1)
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), j.Settings.Timeline) || time.Since(began) > time.Second {
			t.Errorf("after %v: %v, want an error that names the file", time.Since(began), err)
		}
	})
}
