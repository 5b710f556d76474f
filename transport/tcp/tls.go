package tcp

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
)

const (
	// recordBuffer gathers headers and small payloads into one TLS record, in bytes.
	recordBuffer = 16 << 10
	// exporter names the keying material that binds the proof of the job secret to the TLS session, so
	// that a man in the middle cannot relay it into another session.
	exporter    = "EXPORTER-paceline-job"
	bindingSize = 32
)

// secured is a TLS connection. It is not a stream.TryWriter: a record is written whole.
type secured struct {
	*tls.Conn
	out *bufio.Writer
}

// WriteBuffers implements stream.BuffersWriter.
func (s *secured) WriteBuffers(buffers *net.Buffers) error {
	for _, b := range *buffers {
		if _, err := s.out.Write(b); err != nil {
			return err
		}
	}
	*buffers = nil
	return s.out.Flush()
}

// secure makes the function that wraps new connections (stream.Config.Secure).
func secure(config *tls.Config) func(net.Conn, string) (net.Conn, []byte, error) {
	config = config.Clone()
	config.MinVersion = max(config.MinVersion, tls.VersionTLS13)
	return func(nc net.Conn, address string) (net.Conn, []byte, error) {
		var conn *tls.Conn
		if address == "" {
			conn = tls.Server(nc, config)
		} else {
			conn = tls.Client(nc, withServerName(config, address))
		}
		if err := conn.HandshakeContext(context.Background()); err != nil { // nc has a deadline
			return nil, nil, failed(nc.RemoteAddr().String(), err)
		}
		state := conn.ConnectionState()
		binding, err := state.ExportKeyingMaterial(exporter, nil, bindingSize)
		if err != nil {
			return nil, nil, failed(nc.RemoteAddr().String(), err)
		}
		return &secured{conn, bufio.NewWriterSize(conn, recordBuffer)}, binding, nil
	}
}

// withServerName checks the certificate for the dialed host, unless the user named another.
func withServerName(config *tls.Config, address string) *tls.Config {
	if config.ServerName != "" {
		return config
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return config
	}
	config = config.Clone()
	config.ServerName = host
	return config
}

// failed is the error of a TLS handshake in auth's terms: the connection ended, or the peer is not of this job.
func failed(peer string, err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded) {
		return auth.Interrupted(peer, err)
	}
	return fmt.Errorf("%w: TLS with %s: %w", transport.ErrAuth, peer, err)
}
