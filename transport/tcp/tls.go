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
	"strings"
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

// Read implements net.Conn. Under TLS 1.3 a client's handshake is over before the server has seen its certificate, so
// that its first read is where it learns of a refusal.
func (s *secured) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	if err != nil && aboutCertificate(err) {
		err = failed(s.RemoteAddr().String(), err)
	}
	return n, err
}

// aboutCertificate reports whether an error is the peer's alert that it refuses this node's certificate. The alerts of
// crypto/tls have no exported type.
func aboutCertificate(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error" && strings.Contains(op.Err.Error(), "certificate")
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

// withoutTLS reports whether a handshake failed because the peer does not use TLS.
func withoutTLS(err error) bool {
	var record tls.RecordHeaderError
	return errors.As(err, &record) && auth.Plain(record.RecordHeader[:])
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
			if address == "" && withoutTLS(err) {
				_, _ = nc.Write(auth.NoTLS)
			}
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
	var verification *tls.CertificateVerificationError
	switch {
	case withoutTLS(err):
		return fmt.Errorf("%w: %s does not use TLS, which this node does: %s", transport.ErrAuth, peer, auth.EverywhereTLS)
	case aboutCertificate(err):
		return fmt.Errorf("%w: %s has refused this node's certificate (%w): issue PACELINE_TLS_CERT by an authority in that node's PACELINE_TLS_CA, for its address and time",
			transport.ErrAuth, peer, err)
	case errors.As(err, &verification):
		return fmt.Errorf("%w: %s shows a certificate that this node has refused: %w: compare its PACELINE_TLS_CERT with this node's PACELINE_TLS_CA",
			transport.ErrAuth, peer, verification.Err)
	default:
		return fmt.Errorf("%w: TLS with %s: %w", transport.ErrAuth, peer, err)
	}
}
