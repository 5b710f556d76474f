//go:build cgo

package fabric

// #include "provider.h"
import "C"

import (
	"errors"
	"maps"
	"os"
	"runtime"
	"slices"
	"syscall"
	"time"
	"unsafe"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/unique"
)

// device is an endpoint on a fabric's adapter, or on what a provider has instead. All connections of a transport share it. While there are
// some, a goroutine handles what ends.
type device struct {
	provider string
	protocol uint32   // in which endpoints talk
	local    bool     // memory that is read into has to be registered
	virtual  bool     // addresses of registered memory are those of the process that has it
	file     *os.File // to wait for; nil where the provider has none

	up lockorder.RWMutex   // for all that uses c; down locks it
	c  *C.struct_pf_device // nil when it is down

	mu      lockorder.Mutex
	conns   map[uint64]*conn // by the key of messages to them
	regions []*region
	slots   []*slot // by number
	free    []*slot
	posted  int     // slots that receive
	idle    []*slot // that could receive, where the provider had no room
	surplus int     // slots for receiving that are not needed any more
	running bool
	until   time.Time // it does, without connections
}

// slot is memory of one message, and the context of one operation.
type slot struct {
	block   *C.struct_pf_block
	index   C.int
	memory  []byte
	owner   *conn // whose operation it is; nil for what receives
	returns bool  // of messages of that kind
}

// open opens the device of an offer. It is closed when nobody uses it any more.
func (o offer) open() (*device, error) {
	d := &device{provider: o.provider, conns: map[uint64]*conn{}}
	d.up.Place(levelUp, "fabric.device.up")
	d.mu.Place(levelDevice, "fabric.device.mu")
	if err := failure("opening "+o.provider, C.pf_open(o.info, &d.c)); err != nil {
		return nil, err
	}
	i := d.c.info
	d.protocol = uint32(i.ep_attr.protocol)
	d.local, d.virtual = i.domain_attr.mr_mode&C.LF_MR_LOCAL != 0, i.domain_attr.mr_mode&C.LF_MR_VIRT_ADDR != 0
	runtime.AddCleanup(d, func(c *C.struct_pf_device) { C.pf_shut(c) }, d.c)
	if d.c.fd >= 0 {
		var err error
		if d.file, err = waitable(int(d.c.fd)); err != nil {
			return nil, err
		}
	}
	return d, nil
}

var errDown = errors.New("the fabric's endpoint was closed, because a peer that is stopped or unreachable held memory of this process")

func (d *device) isDown() bool {
	d.up.RLock()
	defer d.up.RUnlock()
	return d.c == nil
}

// with calls f with the device, if it is up.
func (d *device) with(doing string, f func(c *C.struct_pf_device) C.int) error {
	d.up.RLock()
	defer d.up.RUnlock()
	if d.c == nil {
		return errDown
	}
	return failure(doing, f(d.c))
}

// name is the address of the endpoint.
func (d *device) name() ([]byte, error) {
	name := make([]byte, maxName)
	length := C.size_t(len(name))
	err := d.with("asking for the endpoint's address", func(c *C.struct_pf_device) C.int {
		return C.pf_name(c, unsafe.Pointer(&name[0]), &length)
	})
	return name[:min(int(length), len(name))], err
}

// peer resolves the name of another endpoint.
func (d *device) peer(name []byte) (number uint64, err error) {
	name = append(slices.Clip(name), 0) // addresses in text end with it
	var n C.uint64_t
	err = d.with("resolving the peer's endpoint", func(c *C.struct_pf_device) C.int { return C.pf_peer(c, unsafe.Pointer(&name[0]), &n) })
	return uint64(n), err
}

func (d *device) receive(s *slot) error {
	return d.with("receiving", func(c *C.struct_pf_device) C.int { return C.pf_receive(c, s.block, s.index) })
}

func (d *device) send(s *slot, length int, peer uint64) error {
	return d.with("sending", func(c *C.struct_pf_device) C.int {
		return C.pf_send(c, s.block, s.index, C.size_t(length), C.uint64_t(peer))
	})
}

// read begins to read a peer's memory into b, which stays where it is until the slot's operation has ended.
func (d *device) read(s *slot, b []byte, local exposed, peer, address, key uint64) error {
	return d.with("reading the peer's memory", func(c *C.struct_pf_device) C.int {
		return C.pf_read(c, s.block, s.index, unsafe.Pointer(&b[0]), C.size_t(len(b)), local.mr, C.uint64_t(peer), C.uint64_t(address), C.uint64_t(key))
	})
}

// join adds a connection: its slots, and what receives for it.
func (d *device) join(c *conn) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.free) < slots {
		if err := d.grow(); err != nil {
			return err
		}
	}
	take := func() (s *slot) {
		s, d.free = d.free[len(d.free)-1], d.free[:len(d.free)-1]
		return s
	}
	for range 2 * credits {
		if d.surplus > 0 {
			d.surplus--
		} else {
			d.idle = append(d.idle, take())
		}
	}
	if err := d.fill(); err != nil {
		return err
	}
	for range credits {
		c.free, c.returns = append(c.free, take()), append(c.returns, take())
	}
	c.reads, c.pulls = take(), take()
	for _, s := range append(slices.Clone(c.free), c.reads, c.pulls) {
		s.owner, s.returns = c, false
	}
	for _, s := range c.returns {
		s.owner, s.returns = c, true
	}
	d.conns[c.key] = c
	if d.file != nil {
		_ = d.file.SetReadDeadline(time.Time{})
	}
	if !d.running {
		d.running = true
		go d.run()
	}
	return nil
}

// grow makes slots.
func (d *device) grow() error {
	var b *C.struct_pf_block
	err := d.with("registering memory for messages", func(c *C.struct_pf_device) C.int {
		return C.pf_block_open(c, C.uint32_t(len(d.slots)), slots, slotBytes, &b)
	})
	if err != nil {
		return err
	}
	memory := unsafe.Slice((*byte)(unsafe.Pointer(b.memory)), slots*slotBytes)
	for i := range slots {
		s := &slot{block: b, index: C.int(i), memory: memory[i*slotBytes : (i+1)*slotBytes]}
		d.slots, d.free = append(d.slots, s), append(d.free, s)
	}
	return nil
}

// leave removes a connection. Its slots come back when their operations have ended.
func (d *device) leave(c *conn, idle []*slot) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conns, c.key)
	d.surplus += 2 * credits
	for _, s := range idle {
		s.owner = nil
		d.free = append(d.free, s)
	}
	if len(d.conns) == 0 {
		d.until = time.Now().Add(lingering)
		if d.file != nil {
			_ = d.file.SetReadDeadline(d.until)
		}
	}
}

// giveBack takes a slot whose operation has ended, of a connection that has left.
func (d *device) giveBack(s *slot) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s.owner = nil
	d.free = append(d.free, s)
}

// recycle has a slot receive again, unless it need not.
func (d *device) recycle(s *slot) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.surplus > 0 {
		d.surplus--
		d.free = append(d.free, s)
		return nil
	}
	d.idle = append(d.idle, s)
	return d.fill()
}

// fill posts slots as far as the provider has room. What comes where none is posted waits at the provider.
func (d *device) fill() error {
	for n := len(d.idle); n > 0; n-- {
		if err := d.receive(d.idle[n-1]); err != nil {
			if d.posted > 0 {
				return nil
			}
			return err
		}
		d.idle = d.idle[:n-1]
		d.posted++
	}
	return nil
}

// Times between looks at what has ended, where the provider does not say when something has: they double while nothing has.
const (
	shortest = 10 * time.Microsecond
	longest  = time.Millisecond
)

// run handles what ends, while there are connections.
func (d *device) run() {
	events := make([]C.struct_pf_event, 64)
	var raw syscall.RawConn
	if d.file != nil {
		raw, _ = d.file.SyscallConn() // only for a file that is closed
	}
	look := func(uintptr) bool { return d.look(events) }
	for pause := shortest; d.goOn(); {
		switch {
		case raw != nil:
			_ = raw.Read(look) // it was told to stop
		case d.look(events):
			pause = shortest
		default:
			time.Sleep(pause)
			pause = min(2*pause, longest)
		}
	}
}

// goOn is false when there are no connections, and the goroutine ends.
func (d *device) goOn() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running = len(d.conns) > 0 || time.Now().Before(d.until)
	return d.running
}

// look handles what has ended. It is false when nothing has, and one may wait.
func (d *device) look(events []C.struct_pf_event) bool {
	for {
		if d.advance(events) {
			return true
		}
		d.up.RLock()
		idle := d.c == nil || d.file == nil || C.pf_idle(d.c) != 0
		d.up.RUnlock()
		if idle {
			return false
		}
	}
}

// advance handles what has ended, and reports whether anything has. One goroutine at a time calls it.
func (d *device) advance(events []C.struct_pf_event) bool {
	n := C.int(0)
	d.up.RLock()
	if d.c != nil {
		n = C.pf_next(d.c, &events[0], C.int(len(events)))
	}
	d.up.RUnlock()
	for _, e := range events[:n] {
		d.mu.Lock()
		s := d.slots[e.number]
		c := s.owner
		d.mu.Unlock()
		err := failure("an operation on the fabric", C.int(e.error))
		if c != nil {
			c.completed(s, err)
		} else {
			d.received(s, int(e.length), err)
		}
	}
	return n > 0
}

// received handles a message.
func (d *device) received(s *slot, length int, err error) {
	var c *conn
	d.mu.Lock()
	d.posted--
	if err == nil && length >= headSize {
		c = d.conns[keyOf(s.memory)]
	}
	_ = d.fill() // where it fails, slots that come back are tried again
	d.mu.Unlock()
	if c != nil {
		c.arrived(s, length)
		return
	}
	_ = d.recycle(s) // of an unknown sender, or of a connection that has ended
}

// down ends all traffic of all connections: there is no other way to take memory back that a peer holds.
func (d *device) down() {
	d.up.Lock()
	if d.c != nil {
		C.pf_down(d.c)
		d.c = nil
	}
	d.up.Unlock()
	d.mu.Lock()
	all := slices.Collect(maps.Values(d.conns))
	d.mu.Unlock()
	for _, c := range all {
		c.mu.Lock()
		c.fail(errDown)
		c.readEnded(errDown)
		c.endPull()
		c.mu.Unlock()
	}
}

// exposed is memory that is registered, for reads by the peer or into it.
type exposed struct {
	mr           *C.struct_lf_mr
	address, key uint64 // what the peer reads by
}

// expose registers memory, which stays where it is until hide.
func (d *device) expose(b []byte) (x exposed, err error) {
	for range 3 { // a random key may be taken
		var code C.int
		err = d.with("registering memory", func(c *C.struct_pf_device) C.int {
			key := unique.Number() >> 1
			if size := c.info.domain_attr.mr_key_size; size < 8 {
				key &= 1<<(8*size) - 1
			}
			code = C.pf_register(c, unsafe.Pointer(&b[0]), C.size_t(len(b)), C.uint64_t(key), &x.mr)
			return code
		})
		if err == nil {
			x.key = uint64(x.mr.key)
			if d.virtual {
				x.address = uint64(uintptr(unsafe.Pointer(&b[0])))
			}
			return x, nil
		}
		if code != enokey {
			break
		}
	}
	return exposed{}, err
}

func (x exposed) hide() { C.pf_unregister(x.mr) }
