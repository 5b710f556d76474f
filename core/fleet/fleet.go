// Package fleet decides which processes a job of changing size has, and the rounds that they form: Horovod's elastic
// training, where processes that survive keep running and form a round of another size.
//
// Machine is pure: the launcher (cmd/paceline/launch) starts and stops the processes, looks for hosts and has the clock.
// Read machine.go, then rounds.go.
package fleet

import (
	"time"
)

// Host is a machine and the number of processes that it may have.
type Host struct {
	Name  string
	Slots int
}

// Settings of a fleet.
type Settings struct {
	First, Min, Max int              // processes of the first round, that a later round needs, that there may be at most
	ResetLimit      int              // how many rounds may follow the first; 0 for any number
	Timeout         time.Duration    // how long the job may be without a round
	Start           time.Duration    // how long a round or a change waits for a process that starts
	Cooldown        [2]time.Duration // how long a host gets no new process after its first failure, and at most; 0 for good
	GoesOn          bool             // a round goes on without members that are lost or ask for the next
	Warning         time.Duration    // a change of hosts that no rank has looked for after this time is worth a warning
}

// Input is one event. At most one of Hosts with Found, Ask, Lost and Ended is set; none where only time has passed.
type Input struct {
	Now   time.Duration // since the job's start; never falls
	Found bool
	Hosts []Host // that there are now, in the order in which they get processes
	Ask   *Ask
	Lost  *Lost
	Ended *Ended
}

// Ask is a process's request for a place in the next round.
type Ask struct {
	Process int
	State   bool   // it has the state of the training
	Commits uint64 // how new that is: one that was lost, and comes back, has less than those that went on
	Skip    bool   // its state is that of the others, unless somebody joins
	Early   bool   // it is not ready yet: while a round runs, it only wants to know which place to expect
}

// Lost is a member that the others of its round have given up. Its process may run, or be stopped.
type Lost struct {
	Round uint64
	Rank  int
}

// Ended is the end of a process.
type Ended struct {
	Process int
	OK      bool
}

// Output is one thing to do. Exactly one field is set.
type Output struct {
	Start   *Place   // start a process on a host
	Stop    *Stop    // end a process
	Round   *Round   // give these processes, which have asked, their places
	Expect  *Expect  // answer a process that has asked early
	Dismiss *Dismiss // answer a process that has asked: it has no place
	Broken  uint64   // the round of this number has lost a member or comes to an end: processes that still join it must ask again
	News    *News    // tell the running processes
	Say     string   // tell the user
	Fail    string   // end the job as failed, for this reason
	Done    bool     // the training has come to its end, and with it the last process
}

// Place is a process on a host. It keeps its slot, and with it what it has there, such as a GPU; the next one gets the lowest that is free.
type Place struct {
	Process int
	Host    string
	Slot    int
}

// Stop ends a process, for a reason.
type Stop struct {
	Process int
	Why     string
	Hung    bool // it is a failure: the process was wanted
}

// Round is a new round. Its members are in the order of their ranks; those of a host follow each other, and one that has
// the newest state comes first, where there is one.
type Round struct {
	Number  uint64
	Members []Place
	Commits uint64 // of that state
	Skip    bool   // all have the same state
	News    uint64 // of which the round is the result
}

// Expect is the round that would begin if everybody asked now. Its members are in the order of their ranks.
type Expect struct {
	Process int
	Members []Place
}

// Dismiss ends a process's wait.
type Dismiss struct {
	Process int
	Why     string
}

// News is a change of the processes: some wait to join, some have to go, or one has been lost.
type News struct {
	Number  uint64
	Removed bool // none waits
}
