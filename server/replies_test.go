package server

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

func result(seq uint64, priority int) reply {
	return reply{outbox.Frame{Header: wire.Header{Type: wire.TypeResult, Seq: seq}}, priority}
}

// TestAnUrgentResultPassesResultsAlone: the number in Seq says when a frame was queued.
func TestAnUrgentResultPassesResultsAlone(t *testing.T) {
	var q replies
	for seq, priority := range []int{-5, -3, -5, -3} {
		q.push(result(uint64(seq), priority))
	}
	for i, kind := range []wire.Type{wire.TypeWindow, wire.TypeFail} {
		q.push(reply{outbox.Frame{Header: wire.Header{Type: kind, Seq: uint64(4 + i)}}, 0})
	}
	q.push(result(6, -9))
	q.push(result(7, -1))
	var left []uint64
	for f, ok := q.Pop(0); ok; f, ok = q.Pop(0) {
		left = append(left, f.Seq)
	}
	if want := []uint64{4, 1, 3, 0, 2, 5, 7, 6}; !slices.Equal(left, want) {
		t.Errorf("frames leave in the order %v, want %v", left, want)
	}
}

// TestResultsAreInOrderWhileOthersLeave compares the queue with one that sorts all that waits.
func TestResultsAreInOrderWhileOthersLeave(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var q replies
	var all []reply
	for seq := range uint64(10_000) {
		if len(all) == 0 || random.IntN(20) < 11 {
			r := result(seq, random.IntN(8))
			q.push(r)
			all = append(all, r)
			slices.SortStableFunc(all, func(a, b reply) int { return b.priority - a.priority })
			continue
		}
		if f, ok := q.Pop(0); !ok || f.Seq != all[0].Seq {
			t.Fatalf("%d leaves in the place of %d", f.Seq, all[0].Seq)
		}
		if all = all[1:]; q.Waiting() != (len(all) > 0) {
			t.Fatalf("%d frames wait", len(all))
		}
	}
}
