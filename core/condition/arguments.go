package condition

import (
	"math"

	"github.com/paceline/paceline/internal/setting"
)

// Arguments are the part of a setting behind a model's name. Getters read them one by one; the first faulty one
// is the error, and values read after it are undefined.
type Arguments struct{ setting.Arguments }

// Iterations reads a number of iterations: a lead, or a distance between barriers.
func (a *Arguments) Iterations(name string, least uint64) uint64 {
	return a.Whole(name, least, MaxLead-1)
}

// Probability reads a number from 0 to 1.
func (a *Arguments) Probability(name string) float64 { return a.Number(name, 0, 1) }

// seed reads the seed of random draws, 0 by default.
func (a *Arguments) seed() uint64 {
	if !a.More() {
		return 0
	}
	return a.Whole("SEED", 0, math.MaxUint64)
}

// End is m, or the error of a faulty or superfluous argument.
func (a *Arguments) End(m Model) (Model, error) {
	if err := a.Err(); err != nil {
		return Model{}, err
	}
	return m, nil
}
