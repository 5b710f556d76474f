package condition

import "time"

// Report is what the owner of a job's machines knows of one live worker when it tunes a model.
type Report struct {
	Rank      int
	Pushed    uint64        // iterations that it has pushed
	At        time.Duration // of the newest of them, since any moment that all reports share
	Interval  time.Duration // that an iteration takes it, without waits; 0: not known yet
	Occupancy float64       // of its node's CPUs by whatever runs there, 0 to 1
}

// Tuner moves a model's pull condition while training runs. It is a pure function: the owner feeds it
// reports from time to time, one for each live worker, and sets what comes back. One tuner decides for
// all keys of a model, or they would drift apart.
type Tuner interface {
	Tune(reports []Report) PullCondition
}
