package transporttest

import "context"

// A node that is stopped is a process that gets SIGSTOP: it neither reads nor writes, connects nor accepts, until it
// continues, and what it closes meanwhile ends only then. Its kernel goes on: connections stay, and what is sent to it
// is held as far as the buffers reach. Its timers run, where those of a process would not.

// running returns when a node is not stopped.
func (n *Network) running(ctx context.Context, node string) error {
	for {
		n.mu.Lock()
		continued := n.traffic.stopped[node]
		n.mu.Unlock()
		if continued == nil {
			return ctx.Err()
		}
		select {
		case <-continued:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// stop stops a node.
func (t *traffic) stop(node string) {
	if t.stopped[node] == nil && !t.closed {
		t.stopped[node] = make(chan struct{})
	}
}

// goOn has a stopped node continue.
func (t *traffic) goOn(node string) {
	continued := t.stopped[node]
	if continued == nil {
		return
	}
	close(continued)
	delete(t.stopped, node)
	for e := range t.ends {
		for _, l := range []*lane{e.in, e.out} {
			if l.path.from == node {
				l.thaw()
			}
		}
	}
}
