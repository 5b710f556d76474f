package node

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/secret"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/shm"
	"github.com/paceline/paceline/transport/tcp"
)

// overTCP is the backend that every process has.
func overTCP(s *settings.Settings, _ *shm.Arena, log *zap.Logger) (transport.Transport, error) {
	c := tcp.Config{
		Secret: s.JobSecret, Integrity: s.Integrity, PeerTimeout: s.PeerTimeout, SendBuffer: int(s.SendBuffer), Congestion: s.Congestion, Sockets: 1, Log: log,
	}
	if c.Congestion == "system" {
		c.Congestion = ""
	}
	if s.Role == "server" {
		c.Sockets = s.ServerSockets
	}
	if s.TLSCert != "" {
		var err error
		if c.TLS, err = loadTLS(s); err != nil {
			return nil, err
		}
	}
	return tcp.New(c), nil
}

// loadTLS reads the certificate of this node and the authority that it trusts. Both ends of a
// connection present a certificate.
func loadTLS(s *settings.Settings) (*tls.Config, error) {
	chain, err := os.ReadFile(s.TLSCert)
	if err != nil {
		return nil, fmt.Errorf("PACELINE_TLS_CERT: %w", err)
	}
	key, err := secret.ReadPrivate(s.TLSKey, limits.MaxKey)
	if err != nil {
		return nil, fmt.Errorf("PACELINE_TLS_KEY: %w", err)
	}
	cert, err := tls.X509KeyPair(chain, key)
	if err != nil {
		return nil, fmt.Errorf("PACELINE_TLS_CERT (%s) and PACELINE_TLS_KEY (%s): %w", s.TLSCert, s.TLSKey, err)
	}
	pem, err := os.ReadFile(s.TLSCA)
	if err != nil {
		return nil, fmt.Errorf("PACELINE_TLS_CA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("PACELINE_TLS_CA: %s holds no certificate in PEM", s.TLSCA)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, RootCAs: pool,
		ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	}, nil
}
