// Package iface finds the addresses of this machine that a job's listeners bind to.
package iface

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/paceline/paceline/internal/each"
)

// Loopback is the address of a local job's listeners.
const Loopback = "127.0.0.1"

// IsLoopback reports whether host, a name or an address without port, can only mean this machine.
// It does not query a name server.
func IsLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback()
}

// IsLocal reports whether host is this machine: its own name, or a name or address of one of its interfaces.
func IsLocal(host, hostname string) bool {
	if IsLoopback(host) || host == hostname || host == firstLabel(hostname) {
		return true
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return false // an unknown name: the remote shell's configuration resolves it
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok && n.IP.Equal(net.IP(addr.AsSlice())) {
			return true
		}
	}
	return false
}

// patience bounds a question about a name.
const patience = 5 * time.Second

// Lookup is net.LookupIP with a bound: who asks only wants to know whether a name leads here, and names of this machine are known at once.
func Lookup(host string) ([]net.IP, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return net.DefaultResolver.LookupIP(ctx, "ip", host)
}

// Own reports whether host is a name of this machine that leads to loopback here, though not elsewhere, as many have their own at 127.0.1.1 in
// /etc/hosts; and that one of the machine's other addresses to which it leads too, "" for none. lookup resolves names, as Lookup does.
func Own(host string, lookup func(host string) ([]net.IP, error)) (address string, own bool) {
	if IsLoopback(host) {
		return "", false
	}
	found, _ := lookup(host) // who needs it reports that nobody knows it
	for _, ip := range found {
		switch {
		case ip.IsLoopback():
			own = true
		case address == "" && IsLocal(ip.String(), ""):
			address = ip.String()
		}
	}
	return address, own
}

// Address is the address to bind to for an interface's name or an address of this machine, "eth0" or
// "10.0.0.3", or for the first in a list that exists here: "ib0,eth0".
func Address(list string) (string, error) {
	all, err := List()
	if err != nil {
		return "", err
	}
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		if ip, err := netip.ParseAddr(item); err == nil && IsLocal(item, "") {
			return ip.String(), nil
		}
		for _, one := range all {
			if one.Name == item && len(one.Addresses) > 0 {
				return one.Addresses[0], nil
			}
		}
	}
	there := each.Of(all, func(one Interface) string { return strings.Join(append([]string{one.Name}, one.Addresses...), " ") })
	return "", fmt.Errorf("no interface or address %q on this machine; there are %s", list, strings.Join(there, ", "))
}

// Towards is this machine's source address for packets to host. Nothing is sent.
func Towards(host string) (string, error) {
	conn, err := net.Dial("udp", net.JoinHostPort(host, "9"))
	if err != nil {
		return "", fmt.Errorf("no route to %s: %w", host, err)
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).IP.String(), nil
}

// Outward is this machine's source address for the Internet.
func Outward() (string, error) {
	if addr, err := Towards("192.0.2.1"); err == nil { // an address for documentation, reached only by a default route
		return addr, nil
	}
	all, err := List()
	if err != nil {
		return "", err
	}
	for _, one := range all {
		if len(one.Addresses) > 0 && !IsLoopback(one.Addresses[0]) {
			return one.Addresses[0], nil
		}
	}
	return "", errors.New("this machine has only a loopback address")
}

// Interface is one network interface that is up.
type Interface struct {
	Name      string   `json:"name"`
	MTU       int      `json:"mtu"`
	Addresses []string `json:"addresses"` // IPv4 first, without link-local ones
}

// List names the interfaces that are up.
func List() ([]Interface, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var up []Interface
	for _, one := range all {
		if one.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := one.Addrs()
		if err != nil {
			return nil, err
		}
		up = append(up, Interface{one.Name, one.MTU, usable(addrs)})
	}
	return up, nil
}

func usable(addrs []net.Addr) []string {
	var v4, v6 []string
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		switch {
		case !ok || n.IP.IsLinkLocalUnicast():
		case n.IP.To4() != nil:
			v4 = append(v4, n.IP.String())
		default:
			v6 = append(v6, n.IP.String())
		}
	}
	return append(v4, v6...)
}

func firstLabel(hostname string) string {
	label, _, _ := strings.Cut(hostname, ".")
	return label
}
