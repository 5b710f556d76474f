package node

import (
	"fmt"
	"io"
	"os"

	"github.com/paceline/paceline/core/tuning"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// connections are those that a worker opens to each server: a search may use more than the job's own.
func connections(s *settings.Settings) int {
	if !s.Autotune {
		return s.Connections
	}
	_, most := tuning.Bounds(tuning.Point{Connections: int64(s.Connections)})
	return int(most)
}

// openTrials begins the log of autotuning, on rank 0.
func (w *Worker) openTrials() (err error) {
	s := &w.Settings
	if !s.Autotune || s.AutotuneLog == "" || s.Rank != 0 {
		return nil
	}
	if w.trials, err = os.Create(s.AutotuneLog); err == nil {
		_, err = w.trials.WriteString(worker.TuningHeader)
	}
	if err != nil {
		return worker.Invalid(fmt.Errorf("PACELINE_AUTOTUNE_LOG: %w", err))
	}
	return nil
}

// tuning is the search that the settings ask for, nil for none.
func (w *Worker) tuning(over func(bool)) *worker.Tuning {
	s := &w.Settings
	if !s.Autotune {
		return nil
	}
	t := &worker.Tuning{Warmup: s.AutotuneWarmup, Steps: s.AutotuneSteps, Over: over}
	if w.trials != nil {
		t.Log = io.Writer(w.trials)
	}
	return t
}
