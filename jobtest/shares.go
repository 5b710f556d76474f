package jobtest

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/worker"
)

// Shares are a rank's view of a held value of which element i belongs to rank i modulo the ranks: each rank adds one to all of its own. So it tells how
// often each rank's differences count in it.
type Shares struct {
	*Held
	Added int // how often this rank has
	ranks int
	least []float32 // what has been read
}

// Shares is a value of n elements on a rank, not declared yet.
func (j *Job) Shares(rank int, name, sync string, n int) *Shares {
	return &Shares{Held: j.Held(rank, name, sync, n), ranks: len(j.Workers), least: make([]float32, n)}
}

// Play does an operation on the value, and checks what it reads: all that this rank has added, once, and no less of others than before.
func (s *Shares) Play(use units.Use) error {
	if err := s.play(s.Op(use, 0)); err != nil {
		return fmt.Errorf("%v of %q on rank %d, which has added %d times: %w", use, s.Name, s.Rank, s.Added, err)
	}
	return nil
}

// Step ends an iteration with the value under a model with supersteps.
func (s *Shares) Step() error {
	use, err := s.ends()
	if err != nil {
		return fmt.Errorf("the end of an iteration of rank %d, which has added %d times to %q: %w", s.Rank, s.Added, s.Name, err)
	}
	if err := s.Play(use); err != nil {
		return err
	}
	return s.begins()
}

func (s *Shares) play(op worker.Op) error {
	if op.Use&units.Add != 0 {
		s.Added++
		s.adds(op.Input)
	}
	if _, err := s.j.Do(s.Rank, op); err != nil || op.Output == nil {
		return err
	}
	s.Took(op)
	if err := s.grows(); err != nil {
		return err
	}
	return s.Has(s.Rank, s.Added)
}

// adds writes what the rank adds once.
//
//go:norace
func (s *Shares) adds(b []byte) {
	for i := s.Rank; i < len(s.Now); i += s.ranks {
		binary.NativeEndian.PutUint32(b[4*i:], math.Float32bits(1))
	}
}

// grows reports an element that is less than it was.
//
//go:norace
func (s *Shares) grows() error {
	for i, x := range s.Now {
		if x < s.least[i] {
			return fmt.Errorf("element %d is %g, and was %g", i, x, s.least[i])
		}
		s.least[i] = x
	}
	return nil
}

// Has reports whether a rank counts so often in what was read last.
//
//go:norace
func (s *Shares) Has(rank, added int) error {
	for i := rank; i < len(s.Now); i += s.ranks {
		if s.Now[i] != 10+float32(added) {
			return fmt.Errorf("element %d, of rank %d, is %g, want %d", i, rank, s.Now[i], 10+added)
		}
	}
	return nil
}
