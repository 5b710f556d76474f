//go:build invariants

package lockorder_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/paceline/paceline/internal/lockorder"
)

func locks() (first, second, other *lockorder.Mutex, third *lockorder.RWMutex) {
	first, second, other, third = new(lockorder.Mutex), new(lockorder.Mutex), new(lockorder.Mutex), new(lockorder.RWMutex)
	first.Place(1, "first")
	second.Place(2, "second")
	other.Place(2, "other")
	third.Place(3, "third")
	return first, second, other, third
}

// panics gives what f panics with.
func panics(f func()) (text string) {
	defer func() { text, _ = recover().(string) }()
	f()
	return ""
}

func TestLocksInOrder(t *testing.T) {
	first, second, _, third := locks()
	for range 2 {
		first.Lock()
		second.Lock()
		third.RLock()
		first.Unlock() // the order of release is free
		third.RUnlock()
		second.Unlock()
	}
	var unplaced lockorder.Mutex
	third.Lock()
	unplaced.Lock()
	third.Unlock()
	unplaced.Unlock()
}

// reader locks for reading.
type reader struct{ *lockorder.RWMutex }

func (r reader) Lock()   { r.RLock() }
func (r reader) Unlock() { r.RUnlock() }

func TestLocksOutOfOrderPanic(t *testing.T) {
	first, second, other, third := locks()
	for name, c := range map[string]struct {
		held, taken sync.Locker
		says        string
	}{
		"a lesser level":    {second, first, "first (level 1) is taken while second (level 2) is held"},
		"the same level":    {second, other, "other (level 2) is taken while second (level 2) is held"},
		"a reader":          {reader{third}, second, "second (level 2) is taken while third"},
		"one lock twice":    {second, second, "second (level 2) is taken while second"},
		"a reader, reading": {third, reader{third}, "third (level 3) is taken while third"},
	} {
		c.held.Lock()
		if text := panics(c.taken.Lock); !strings.Contains(text, c.says) {
			t.Errorf("%s: panics with %q, want %q", name, text, c.says)
		}
		c.held.Unlock()
	}
}

func TestUnlockOfAnotherGoroutinesLockPanics(t *testing.T) {
	first, _, _, _ := locks()
	first.Lock()
	text := make(chan string)
	go func() { text <- panics(first.Unlock) }()
	if got := <-text; !strings.Contains(got, "first is released by a goroutine that does not hold it") {
		t.Errorf("panics with %q", got)
	}
	first.Unlock()
}
