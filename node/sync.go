package node

import (
	"encoding/json"

	"github.com/paceline/paceline/core/condition"
)

// CheckSync is condition.CheckSetting for the place where the user names a model, before training starts.
func CheckSync(setting string, softPark, accumulate bool, workers int) error {
	flow := condition.Aggregate
	if accumulate {
		flow = condition.Accumulate
	}
	return condition.CheckSetting(setting, softPark, flow, workers)
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
