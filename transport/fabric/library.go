//go:build cgo

package fabric

// #cgo CFLAGS: -std=gnu11 -O2 -Wall
// #cgo LDFLAGS: -ldl -lpthread
// #include <stdlib.h>
// #include "provider.h"
import "C"

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// errAgain is the error of an operation for which there is no room now.
var errAgain = errors.New("the provider is busy")

const (
	eagain = -11
	enokey = -266
)

// failure is the error of a function of libfabric.
func failure(doing string, code C.int) error {
	switch {
	case code == 0:
		return nil
	case code == eagain:
		return errAgain
	}
	return fmt.Errorf("%s: libfabric: %s (%d)", doing, C.GoString(C.pf_strerror(code)), -code)
}

// load loads libfabric.
func load() error {
	if wrong := C.pf_load(); wrong != nil {
		return errors.New(C.GoString(wrong))
	}
	return nil
}

// offer is one of the devices that libfabric has.
type offer struct {
	provider, device string
	host             netip.Addr // not valid where the device's addresses are of another kind
	info             *C.struct_lf_info
}

// find lists what a provider offers, or all do where it is "". use is called with the list, whose members are valid until it returns.
func find(provider string, use func([]offer) error) error {
	if err := load(); err != nil {
		return err
	}
	var name *C.char
	if provider != "" {
		name = C.CString(provider)
		defer C.free(unsafe.Pointer(name))
	}
	var list *C.struct_lf_info
	if err := failure(strings.TrimSpace("looking for fabrics "+provider), C.pf_find(name, &list)); err != nil {
		return err
	}
	defer C.pf_forget(list)
	var all []offer
	for i := list; i != nil; i = i.next {
		all = append(all, offer{
			provider: C.GoString(i.fabric_attr.prov_name), device: C.GoString(i.domain_attr.name), host: hostOf(i), info: i,
		})
	}
	return use(all)
}

// hostOf is the internet address of an offer.
func hostOf(i *C.struct_lf_info) (host netip.Addr) {
	if i.src_addr == nil {
		return host
	}
	raw := unsafe.Slice((*byte)(i.src_addr), int(i.src_addrlen)) // a sockaddr of the C library
	switch {
	case i.addr_format == C.LF_SOCKADDR_IN && len(raw) >= 8:
		return netip.AddrFrom4([4]byte(raw[4:8]))
	case i.addr_format == C.LF_SOCKADDR_IN6 && len(raw) >= 24:
		return netip.AddrFrom16([16]byte(raw[8:24])).Unmap()
	}
	return host
}

// hardware are the providers of adapters that read and write memory by themselves.
var hardware = []string{"verbs", "efa", "cxi", "psm2", "psm3", "opx"}

// choose takes an offer: of the provider that is asked for, or of one with hardware; and with the host's address where there is one.
func choose(all []offer, provider string, host netip.Addr) (offer, error) {
	all = slices.DeleteFunc(slices.Clone(all), func(o offer) bool {
		name, _, _ := strings.Cut(o.provider, ";")
		return provider == "" && !slices.Contains(hardware, name)
	})
	if len(all) == 0 {
		return offer{}, errors.New("no adapter for which libfabric has a provider")
	}
	if i := slices.IndexFunc(all, func(o offer) bool { return o.host == host }); i >= 0 {
		return all[i], nil
	}
	return all[0], nil
}

// waitable is a file by which the runtime waits for a descriptor.
func waitable(fd int) (*os.File, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(own, true); err != nil {
		unix.Close(own)
		return nil, err
	}
	file := os.NewFile(uintptr(own), "completions")
	if err := file.SetReadDeadline(time.Time{}); err != nil {
		file.Close()
		return nil, fmt.Errorf("waiting for completions: %w", err)
	}
	return file, nil
}
