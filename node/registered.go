package node

import (
	"sync"
	"unsafe"

	"github.com/paceline/paceline/transport"
)

// registered is the program's memory that stays registered with the transports while a worker runs.
type registered struct {
	kinds *transport.Set

	mu      sync.Mutex
	regions map[unsafe.Pointer][]transport.Region // by where the memory begins
	ended   bool
}

// Register registers memory that the program will send and receive in, until Unregister or the end of the worker.
func (r *registered) Register(memory []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || len(memory) == 0 {
		return
	}
	if regions := r.kinds.Register(memory); len(regions) > 0 {
		if r.regions == nil {
			r.regions = map[unsafe.Pointer][]transport.Region{}
		}
		r.regions[unsafe.Pointer(unsafe.SliceData(memory))] = regions
	}
}

// Unregister ends the registration of the memory that begins there, if it has one. No operation uses it any more.
func (r *registered) Unregister(at unsafe.Pointer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	release(r.regions[at])
	delete(r.regions, at)
}

// end is Unregister of all, for good.
func (r *registered) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	for _, regions := range r.regions {
		release(regions)
	}
	r.regions = nil
}

func release(regions []transport.Region) {
	for _, r := range regions {
		r.Release()
	}
}
