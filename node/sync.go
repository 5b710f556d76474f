package node

import (
	"errors"

	"github.com/paceline/paceline/core/condition"
)

// CheckSync reports whether so many workers can run a synchronisation model on a tensor that is reduced, or
// held by the servers. It is for the place where the user names the model, before training starts.
func CheckSync(setting string, softPark, accumulate bool, workers int) error {
	m := condition.BSP()
	if setting != "" {
		var err error
		if m, err = condition.Parse(setting); err != nil {
			return err
		}
	}
	flow := condition.Aggregate
	if accumulate {
		flow = condition.Accumulate
	}
	if softPark && !accumulate {
		return errors.New("soft-barrier parking answers before an iteration is closed, which a reduction cannot serve: use lazy parking")
	}
	if err := m.Check(flow); err != nil {
		return err
	}
	return m.CheckWorkers(workers)
}
