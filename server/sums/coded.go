package sums

import (
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
)

// addMessage adds what a rank's message says, or nothing where it is malformed.
func (s *slot) addMessage(rank int, message []byte) (err error) {
	from := &s.chunks[0].from
	if from.Len() == 0 {
		err = s.Pushes.Decode(s.acc, message)
	} else {
		err = s.Pushes.DecodeAdd(s.acc, message)
	}
	if err != nil {
		return s.Malformed(rank, err)
	}
	from.Add(rank)
	return nil
}

// addMessages is combine for messages.
func (s *slot) addMessages(contributors rankset.Set) error {
	for _, rank := range s.Ranks {
		if message, ok := s.contributions[rank]; ok && contributors.Has(rank) {
			if err := s.addMessage(rank, message); err != nil {
				return err
			}
		}
	}
	return nil
}

// encode is store for a coded tensor: the sum, scaled, becomes one message for all.
func (n *iterations) encode(s *slot, iteration uint64) error {
	residual, err := n.ownResidual()
	if err != nil {
		return err
	}
	mul, div := s.Rescale(s.divisor)
	reduce.Store(units.Float32, s.acc, s.acc, n.Prescale*mul, div)
	message, err := n.Coding.Encode(n.Answers, s.acc, residual, n.Coding.At(n.before+iteration, 0))
	if err != nil {
		return err
	}
	n.Round.Pool.Put(s.acc)
	s.acc, s.result = nil, room.NewBuffer(n.Round.Pool, message)
	return nil
}
