package worker

import "github.com/paceline/paceline/internal/lockorder"

// All locks of the worker role. A goroutine holds one of them at a time, which is why they have one level, and none
// while it calls the server in this process or the user: a server may hold its own locks, whose levels are smaller, when
// it answers.
//
//	Engine.mu         what is known of names and is in flight
//	operation.mu      why an operation fails, and its tasks
//	peer.mu           the traffic with a server
//	localQueue.mu     what waits for the server in this process
//	encoder.mu        what waits to be encoded, and how far it is ahead
//	conditions.mu     changes of conditions that wait for replies
//	occupancy.mu      the newest measurement
//	timeline.mu       the timeline's file
//	profiler.mu       what was measured of servers
//
// Engine.turn comes before all of them: a channel in place of a lock, held while the heirs of one lost server take over.
//
// To be taken under any of them:
//
//	kept.mu           the last results of an elastic job
//
// A task's life needs none: it is a state in an atomic variable, and what may be done follows from its steps
// (core/task).
const (
	levelWorker lockorder.Level = 100
	levelKept   lockorder.Level = 101
)
