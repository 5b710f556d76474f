package scheduler

import "time"

// clock is the time of a machine. Time in which the scheduler's process did not run (SIGSTOP, a machine that was suspended) does not pass: nodes have said meanwhile what lies
// unread, and a deadline that has passed would be kept before that is heard. So one that is late by more than the patience is put off by that again.
type clock struct {
	patience time.Duration // for what lies unread to be heard
	behind   time.Duration // in which the process did not run
}

// now is the time of the machine at a time of the process.
func (c *clock) now(process time.Duration, m *Machine) time.Duration {
	at, ok := m.Deadline()
	if late := process - c.behind - at; ok && late > c.patience {
		c.behind += late + c.patience
	}
	return process - c.behind
}
