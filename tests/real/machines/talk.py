"""Says something over the network: MODE ADDRESS [NUMBER]; prints a word about what came of it.

listen: answers every TCP line and UDP packet with itself, and prints "ready".
say:    a line over a fresh connection, for NUMBER seconds; prints the answer or the error.
keep:   lines over one connection while they are answered; prints "answered", then the error.
spray:  NUMBER UDP packets; prints how many were answered.
"""

import socket
import socketserver
import sys
import threading
import time

PORT = 7007


class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)


class EchoPacket(socketserver.BaseRequestHandler):
    def handle(self):
        data, answering = self.request
        answering.sendto(data, self.client_address)


def listen(address):
    socketserver.ThreadingTCPServer.daemon_threads = True
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    packets = socketserver.UDPServer((address, PORT), EchoPacket)
    threading.Thread(target=packets.serve_forever, daemon=True).start()
    with socketserver.ThreadingTCPServer((address, PORT), Echo) as server:
        print("ready", flush=True)
        server.serve_forever()


def say(address, limit_s):
    with socket.create_connection((address, PORT), limit_s) as connection:
        connection.sendall(b"hello\n")
        print(connection.recv(100).decode().strip(), flush=True)


def keep(address):
    with socket.create_connection((address, PORT), 60) as connection:
        for count in range(100_000):
            connection.sendall(b"hello\n")
            if not connection.recv(100):
                raise ConnectionAbortedError
            if count == 0:
                print("answered", flush=True)
            time.sleep(0.005)


def spray(address, number):
    answered = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
        packets.settimeout(0.02)
        for count in range(number):
            packets.sendto(str(count).encode(), (address, PORT))
            try:
                while packets.recv(100) != str(count).encode():
                    pass
                answered += 1
            except TimeoutError:
                pass
    print(answered, flush=True)


def main():
    mode, address, *number = sys.argv[1:]
    try:
        {"listen": listen, "say": say, "keep": keep, "spray": spray}[mode](
            address, *map(int, number)
        )
    except OSError as error:
        print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main()
