// Package lockorder provides mutexes with a checked order. A role names all its locks in one file, in the order in which
// they are taken; builds with the tag "invariants" panic where a goroutine takes one out of order, takes two of one
// level, or releases one that it does not hold. Other builds pay nothing: a Mutex is a sync.Mutex.
//
// A role's file:
//
//	const (
//		levelRound lockorder.Level = iota + 1 // round.mu: who is there, which tensors are announced
//		levelKey                              // key.mu: under round.mu
//	)
//
// and where the lock is created: k.mu.Place(levelKey, "key"). A lock that has no place is not checked.
package lockorder

// Level is a lock's place in its role's order: a goroutine that holds one takes only locks of greater levels.
// 0 means unchecked.
type Level int
