package room

import "github.com/paceline/paceline/internal/lockorder"

// All locks of the server role, in the order in which they are taken: who holds one takes only those below it. Nobody
// waits for a peer while holding one. Below them all lie the pools' own.
const (
	LevelServer   lockorder.Level = iota + 1 // Server.mu: the round, the connections of any round
	LevelRound                               // round.mu: who is there, which tensors are announced
	LevelNames                               // names.mu: what ranks say of names
	LevelParts                               // Partitions.mu: the partitions of a tensor; held.Room.mu: the decider beside them
	LevelDecider                             // held: where supersteps end
	LevelTuners                              // held: the tuners by model
	LevelTuner                               // held: one tuner
	LevelKey                                 // one partition: sums.key.mu or held.value.mu
	LevelCopies                              // held.Copies.mu: the reference copies of all values
	LevelTransfer                            // transfer.Room.mu: what is put until it is got
	LevelMessages                            // messages.Room.mu: the mailboxes of ranks
	LevelConn                                // replies.mu: the frames that wait on a connection; cork.mu: the connections that keep them back
)
