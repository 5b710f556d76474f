// Package agreement is what ranks say of one name, and what follows where they do not say the same.
//
// Every rank counts the operations that it starts under a name, and brings each of them to one server, the
// name's home. Operations with the same count belong together. Home is the half of the servers: it finds out
// ranks that bring different things under one count and ranks that do not come, and fails the operation on
// every rank. Uses is the half of a worker: it counts, hears of failures, in flight here or not yet started,
// and gives the name a new generation, under which its tensors are declared anew.
//
// Both are pure: they read no clock, send nothing and take no lock. Reading order: home.go, members.go (joins,
// goodbyes), stall.go, rank.go, patience.go.
package agreement

import (
	"cmp"
	"fmt"
	"time"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
)

// ID is a name within a process set.
type ID struct {
	Set  uint32
	Name string
}

func (id ID) compare(other ID) int {
	return cmp.Or(cmp.Compare(id.Set, other.Set), cmp.Compare(id.Name, other.Name))
}

// Tensor is a declared tensor, as far as ranks can differ about it. Ranks that bring the same *Tensor under one
// count agree. It does not change.
type Tensor struct {
	ID
	Generation uint64 // of the name, when the tensor was declared
	Signature  string // what was declared, as people read it
	Kind       units.Kind
	Root       int         // of a broadcast or a held value
	Ranks      rankset.Set // of the process set
	Enough     int         // ranks that an operation does without the others; 0 where it needs all
	Coded      bool
}

// Failure ends one operation on every rank that it names. Each of them answers with a cancel.
type Failure struct {
	Ranks  rankset.Set // whom to tell
	Tensor *Tensor     // nil: it is the join under way that fails
	Count  uint64
	Code   units.FailureCode
	Text   string
}

// OfJoin reports whether it is the join under way that fails, rather than an operation.
func (f Failure) OfJoin() bool { return f.Tensor == nil }

func (f Failure) String() string {
	if f.OfJoin() {
		return fmt.Sprintf("tell %v: the join fails, %v: %s", f.Ranks, f.Code, f.Text)
	}
	return fmt.Sprintf("tell %v: %d of %q, generation %d, fails, %v: %s", f.Ranks, f.Count, f.Tensor.Name, f.Tensor.Generation, f.Code, f.Text)
}

// Stall is a warning: an operation waits for ranks that do not come. All that wait are told; the first of them logs it,
// so that there is one line for all.
type Stall struct {
	Ranks   rankset.Set // that wait
	Name    string
	Missing rankset.Set
	Waited  time.Duration
}

func (s Stall) String() string {
	return fmt.Sprintf("warn %s: %q has waited %v for ranks %v", s.Ranks.Named(), s.Name, s.Waited, s.Missing)
}

// hinderedBy says why an operation cannot be done while ranks have joined, "" if it can.
func (t *Tensor) hinderedBy(joined rankset.Set) string {
	switch gone := joined.Overlap(t.Ranks); {
	case t.holds() && gone.Has(t.Root): // of a held value only its declaration is asked for
		return fmt.Sprintf("%q cannot be done: its root, rank %d, has joined", t.Name, t.Root)
	case t.Kind.NeedsAll() && gone.Len() > 0:
		return fmt.Sprintf("%q cannot be done: %v needs every rank, and %s has joined", t.Name, t.Kind, gone.Named())
	}
	return ""
}

// holds reports whether the servers hold a value of the tensor, rather than sum its iterations.
func (t *Tensor) holds() bool { return t.Kind == units.Accumulate }

// brokenBy says why an operation of an elastic job cannot be done without ranks that have gone, "" if it can: nobody else has the value that a
// root declares, and ranks split rows among all of them. What a root broadcasts others may have already: its server finds out.
func (t *Tensor) brokenBy(gone rankset.Set) string {
	switch gone = gone.Overlap(t.Ranks); {
	case gone.Len() == 0:
	case t.Kind.Splits():
		return fmt.Sprintf("%q cannot be done: %v needs every rank of its process set, and %s has gone; make a set of the ranks that are left", t.Name, t.Kind, gone.Named())
	case t.holds() && gone.Has(t.Root):
		return fmt.Sprintf("%q cannot be done: its root, rank %d, has gone", t.Name, t.Root)
	}
	return ""
}

func hasLeft(t *Tensor, rank int) string {
	return fmt.Sprintf("%q cannot be done: rank %d has shut down", t.Name, rank)
}

// earlierFailure is for an operation that some ranks bring, of which these know that the name has failed.
func earlierFailure(t *Tensor, ranks rankset.Set) string {
	text := fmt.Sprintf("%q cannot be done: an operation of that name has failed on %s before, whose error says why", t.Name, ranks.Named())
	if t.Coded {
		text += "; or only some ranks have loaded a compression state; every rank loads its own, behind a barrier"
	}
	return text
}
