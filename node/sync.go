package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/node/settings"
)

// CheckSync is condition.CheckSetting for the place where the user names a model, before training starts.
func CheckSync(setting string, softPark, accumulate bool, workers int) error {
	flow := condition.Aggregate
	if accumulate {
		flow = condition.Accumulate
	}
	return condition.CheckSetting(setting, softPark, flow, workers)
}

// CheckSettings reports settings with which no worker of a job of this size would start, for the place that knows them
// before any does. Where workers have other files than this process, it leaves a codecs' file to them.
func CheckSettings(s *settings.Settings, workers int, otherFiles bool) error {
	if err := checkSync(s, workers); err != nil {
		return err
	}
	_, _, err := jobCompression(s.Compression)
	if missing := new(fs.PathError); otherFiles && errors.As(err, &missing) {
		return nil
	}
	return err
}

// checkSync checks the setting of the job's model.
func checkSync(s *settings.Settings, workers int) error {
	if err := CheckSync(s.Sync, false, true, workers); err != nil {
		return fmt.Errorf("PACELINE_SYNC: %w", err)
	}
	return nil
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
		Whole        bool   `json:"whole"`
		Supersteps   bool   `json:"supersteps"`
		Significance bool   `json:"significance"`
	}{t.Setting, t.Dataflow == condition.Accumulate, t.Whole, t.Supersteps, t.Significance})
}
