package node

import (
	"encoding/json"
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

// SyncInfo is the properties of the synchronisation model that a setting names, in JSON, for bindings.
func SyncInfo(setting string) ([]byte, error) {
	t, err := condition.Properties(setting)
	if err != nil {
		return nil, err
	}
	return json.Marshal(struct {
		Setting      string `json:"setting"`
		Held         bool   `json:"held"`
		Supersteps   bool   `json:"supersteps"`
		Significance bool   `json:"significance"`
	}{t.Setting, t.Dataflow == condition.Accumulate, t.Supersteps, t.Significance})
}
