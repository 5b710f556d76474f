package condition

import "time"

// Report is the input of tuning for one live worker.
type Report struct {
	Rank      int
	Pushed    uint64        // iterations that it has pushed
	At        time.Duration // of the newest of them, from an origin common to all reports
	Interval  time.Duration // duration of an iteration, without waits; 0: unknown
	Occupancy float64       // of its node's CPUs by all programs, 0 to 1
}

// Tuner moves a model's pull condition while training runs. It is a pure function: the owner calls it
// with one report per live worker from time to time, and sets the result. One tuner decides for all keys of a
// model, or they would diverge.
type Tuner interface {
	Tune(reports []Report) PullCondition
}
